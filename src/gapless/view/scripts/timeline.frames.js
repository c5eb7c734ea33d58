// The timelines of the page: their elements, and when what of them is painted. All share one view, a stretch of time.
// Names reach the document as text nodes only.

const element = (id) => document.getElementById(id);
const header = JSON.parse(element("data").textContent);
const measures = { time: new Measure(header.time), memory: new Measure(header.memory) };
const stats = { ms: 0, blocks: 0, pixels: 0, rows: 0, frames: 0 };
const look = new Look(header.kinds, header.ink);
const painter = new Painter(look, measures, stats);
const MOST_PIXELS = 24e6; // of all canvases together; beyond, those of tall timelines are as tall as the window and move with it
const TALLEST = 8192; // canvas, in device pixels
let sections = [];
let memoryLimit = null;
let memoryTop = 0;
let total = 1; // the longest makespan
let home = 1; // where the view ends when everything that is comparable fits
const view = { start: 0, end: 1 };
let rowsChoice = "comfortable";
let pointerTime = null;
let hovered = null; // {section, number, idle}: idle says that the pointer is in the gap before that action
let pinned = null; // {section, number}
let due = false; // a frame
const listeners = []; // of what a link keeps: called after every change of the view, the rows or the pinned action

/** Puts these timelines where others were. What is in them may come later, with `fill`. */
function place(timelines, limit, homeEnd) {
  const taller = new Map(sections.map((section) => [section.description.name, section.rowsChoice]));
  sections = timelines.map(sectionOf);
  for (const section of sections) section.rowsChoice = taller.get(section.description.name) ?? null;
  memoryLimit = limit;
  memoryTop = Math.max(limit ?? 0, ...timelines.map((timeline) => Math.max(0, ...timeline.peaks)));
  const [oldTotal, oldHome] = [total, home];
  total = Math.max(0, ...timelines.map((timeline) => timeline.makespan)) || 1;
  home = homeEnd ?? total;
  const whole = view.start <= 0 && view.end >= Math.min(oldTotal, oldHome);
  if (whole || view.end > total) Object.assign(view, { start: 0, end: home });
  [hovered, pinned] = [null, null];
  showDetails(null);
  element("sections").replaceChildren(...sections.map((section) => section.root));
  for (const section of sections) listen(section.plot, section);
  layout();
}

function fill(section, data) {
  section.data = data;
  section.stale = true;
  redraw("overlay");
}

/** The element of a timeline: its name, its figures, and two canvases. */
function sectionOf(description, index) {
  const make = (tag, className, parent, text = "") => {
    const made = document.createElement(tag);
    made.className = className;
    made.textContent = text;
    return parent?.appendChild(made) ?? made;
  };
  const root = make("section", "timeline", null);
  root.id = `timeline-${index}`;
  const head = make("header", "", root);
  const heading = make("h2", "", head);
  heading.id = `name-${index}`;
  const name = make("button", "name", heading, description.name);
  name.type = "button";
  name.title = `${description.name}: show its rows taller or thinner`;
  const figures = make("p", "figures", head);
  for (const [word, value] of description.figures) {
    const figure = make("span", "", figures, `${word} `);
    make("b", "", figure, value);
  }
  const more = make("span", "more", figures, "goes on to the right");
  more.hidden = true;
  const plot = make("div", "plot", root);
  const numDevices = description.rows.length - 1;
  const words = `${description.name}: ${numDevices} devices, ${description.rows[numDevices]} actions`;
  Object.assign(plot, { tabIndex: 0, role: "group", ariaLabel: words });
  plot.setAttribute("aria-describedby", "keys");
  root.setAttribute("aria-labelledby", heading.id);
  const layers = make("div", "layers", plot);
  const [rows, overlay] = [0, 1].map(() => make("canvas", "", layers));
  const section = { index, root, plot, layers, rows, overlay, more, numDevices, description, data: null, stale: true, rowsChoice: null };
  name.addEventListener("click", () => {
    section.rowsChoice = densityNameOf(section) === "overview" ? "comfortable" : "overview";
    layout();
  });
  return section;
}

const densityNameOf = (section) => section.rowsChoice ?? rowsChoice;

function densityOf(section) {
  const name = densityNameOf(section);
  return DENSITIES[name === "overview" && section.numDevices > CROWD ? "crowded" : name];
}

// -- frames -----------------------------------------------------------------------------------------------------------------

function redraw(what = "rows") {
  if (what === "rows") for (const section of sections) section.stale = true;
  if (!due) requestAnimationFrame(frame);
  due = true;
}

/** Paints what is in the window now, and what lies outside it a little later: it may be captured or printed. */
function frame() {
  const began = performance.now();
  const rows = sections.some((section) => section.stale);
  due = false;
  if (rows) Object.assign(stats, { blocks: 0, pixels: 0, rows: 0 });
  const width = element("axis").clientWidth;
  const geometry = new Geometry({ view, width, density: DENSITIES.comfortable, scroll: 0, height: 26 });
  paintAxis(penOf(element("axis"), width, 26), geometry, look, measures.time, pointerTime);
  for (const section of sections) {
    section.more.hidden = section.description.makespan <= view.end * (1 + 1e-9);
    const shownPart = geometryOf(section);
    if (section.data && shownPart) paint(section, shownPart);
  }
  if (rows) Object.assign(stats, { ms: performance.now() - began, frames: stats.frames + 1 });
  if (sections.some(waits)) later(paintRest);
}

const waits = (section) => section.stale && section.whole && section.data;
const later = window.requestIdleCallback ? (what) => requestIdleCallback(what, { timeout: 300 }) : (what) => setTimeout(what, 100);

/** One timeline outside the window at a time. */
function paintRest() {
  const next = sections.find(waits);
  if (!next || due) return;
  const kept = { ...stats };
  paint(next, wholeGeometry(next));
  Object.assign(stats, kept);
  if (sections.some(waits)) later(paintRest);
}

function paint(section, geometry) {
  if (section.stale || !section.whole) {
    painter.paint(penOf(section.rows, geometry.width, geometry.height), section.data, geometry, {
      memoryTop,
      memoryLimit,
      followed: pinned?.section === section ? pinned.followed : null,
    });
  }
  section.stale = false;
  const shownAction = pinned ?? hovered;
  paintOverlay(penOf(section.overlay, geometry.width, geometry.height), section.data, geometry, look, {
    time: pointerTime,
    number: shownAction?.section === section && !shownAction.idle ? shownAction.number : -1,
  });
}

/** Where a section's visible rows are, or null if none is in the window. */
function geometryOf(section) {
  const box = section.layers.getBoundingClientRect();
  if (box.bottom < 0 || box.top > innerHeight) return null;
  const scroll = box.top - section.plot.getBoundingClientRect().top;
  return new Geometry({ view, width: box.width, density: densityOf(section), scroll, height: box.height });
}

function wholeGeometry(section) {
  const { offsetWidth: width, offsetHeight: height } = section.plot;
  return new Geometry({ view, width, density: densityOf(section), scroll: 0, height });
}

const heightOf = (section) => TOP + section.numDevices * pitchOf(densityOf(section)) + 4;

/** Heights follow from the number of devices alone, so nothing moves when the data arrives. */
function layout() {
  const width = element("axis").clientWidth;
  const pixels = sections.reduce((sum, section) => sum + heightOf(section) * width * devicePixelRatio ** 2, 0);
  for (const section of sections) {
    const height = heightOf(section);
    section.whole = pixels <= MOST_PIXELS && height * devicePixelRatio <= TALLEST;
    section.plot.style.height = `${height}px`;
    section.layers.style.height = `${section.whole ? height : Math.min(height, Math.max(120, innerHeight - 112))}px`;
  }
  redraw();
}
