// Opening the page: the controls first, then the timelines of the file one after another.

async function open() {
  setUpTools();
  setUpTable();
  applyTheme();
  document.addEventListener("keydown", keys);
  addEventListener("scroll", () => redraw("overlay"), { passive: true });
  new ResizeObserver(layout).observe(document.documentElement);
  addEventListener("resize", layout);
  listen(element("axis"), null);
  const { timelines = [] } = header;
  rowsChoice = element("density").value = rowsFor(timelines);
  Object.assign(view, { start: 0, end: Infinity });
  place(timelines, header.memoryLimit ?? null, header.home);
  for (const section of sections) {
    const source = element(`columns-${section.index}`);
    fill(section, await readTimeline(section.description, source.textContent));
    source.remove(); // the text is as large as all numbers together
  }
  followLink();
  if (header.refresh) setTimeout(() => location.reload(), 1000 * header.refresh); // which keeps the zoom and the place
}

function rowsFor(timelines) {
  const most = Math.max(0, ...timelines.map((timeline) => timeline.rows.length - 1));
  return header.rows ?? (most > 64 ? "overview" : most <= 16 ? "comfortable" : "compact");
}

const ready = open().catch((error) => {
  say(`The timelines could not be drawn: ${error.message}`);
  throw error;
});

/** A small window into the page for tests and the console; nothing in it changes anything. */
window.gapless = Object.freeze({
  ready: ready.then(() => true),
  view: () => ({ ...view }),
  stats: () => ({ ...stats }),
  pinned: () => pinned && facts(pinned).action,
  actionAt(timeline, device, time) {
    const { data } = sections[timeline];
    const number = data.actionAt(device, time);
    if (number < 0) return null;
    const { needs, neededBy, ...known } = facts({ section: sections[timeline], number });
    const names = (numbers) => numbers.map((n) => nameOf(data, n));
    return { ...known, start: data.start[number], end: data.end[number], needs: names(needs), neededBy: names(neededBy) };
  },
  /** The middle of what runs on a device at a time, in the window's pixels. */
  place(timeline, device, time) {
    const section = sections[timeline];
    const geometry = geometryOf(section);
    if (!geometry) return null;
    const box = section.layers.getBoundingClientRect();
    return { x: box.left + geometry.x(time), y: box.top + geometry.y(device) + geometry.density.bar / 2 };
  },
});
