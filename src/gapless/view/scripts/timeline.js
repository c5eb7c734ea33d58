// What moves the view, and what is known of one action; the table; the theme.

// -- the view -------------------------------------------------------------------------------------------------------------------

function setView(start, end) {
  const length = Math.min(total * 1.02, Math.max(total * 1e-7, end - start));
  const middle = (start + end) / 2;
  view.start = Math.min(Math.max(middle - length / 2, -0.01 * total), 1.01 * total - length);
  view.end = view.start + length;
  if (length >= total) Object.assign(view, { start: 0, end: total });
  setHovered(null); // what lies under the pointer has moved away
  redraw();
  changed();
}

/** What can be compared fills the window; asked again, all there is. */
function fit() {
  const atHome = view.start === 0 && view.end === home;
  setView(0, atHome ? total : home);
}

function changed() {
  for (const listener of listeners) listener();
}

function zoom(factor, around = (view.start + view.end) / 2) {
  const length = Math.min(total, Math.max(total * 1e-7, (view.end - view.start) * factor));
  const share = (around - view.start) / (view.end - view.start);
  setView(around - share * length, around + (1 - share) * length);
}

function pan(share) {
  const shift = share * (view.end - view.start);
  setView(view.start + shift, view.end + shift);
}

/** Brings an action into view without changing the zoom more than needed. */
function reveal(section, number) {
  const { data } = section;
  const length = view.end - view.start;
  if (data.start[number] < view.start || data.end[number] > view.end) {
    const middle = (data.start[number] + data.end[number]) / 2;
    const wanted = Math.max(length, (data.end[number] - data.start[number]) * 1.2);
    setView(middle - wanted / 2, middle + wanted / 2);
  }
  const top = section.plot.getBoundingClientRect().top + data.deviceOf(number) * pitchOf(densityOf(section));
  if (top < 120 || top > innerHeight - 220) scrollBy({ top: top - innerHeight / 3, behavior: "instant" });
}

// -- pointer and keys ---------------------------------------------------------------------------------------------------------------

/** What the pointer is on: an action, or the idle time before one. */
function hit(section, clientX, clientY) {
  const geometry = geometryOf(section);
  if (!section.data || !geometry) return null;
  const box = section.layers.getBoundingClientRect();
  const x = clientX - box.left;
  const { device, below } = geometry.row(clientY - box.top);
  if (x < geometry.left || x > geometry.left + geometry.plotWidth || device < 0 || device >= section.numDevices) return null;
  const { bar, gap, curve } = geometry.density;
  if (below > bar + gap + curve) return null;
  const time = geometry.time(x);
  const number = section.data.actionAt(device, time, 2 * geometry.perPixel);
  if (number >= 0) return { section, number, idle: false };
  if (time < 0 || time > section.data.makespan) return null;
  return { section, number: section.data.firstEndingAfter(device, time), idle: true, device };
}

function pointerTimeAt(clientX) {
  const box = element("axis").getBoundingClientRect();
  const geometry = new Geometry({ view, width: box.width, density: DENSITIES.comfortable, scroll: 0, height: 0 });
  const x = clientX - box.left;
  return x < geometry.left || x > geometry.left + geometry.plotWidth ? null : geometry.time(x);
}

/** Drag to pan, two fingers to zoom, a click to pin. */
function listen(target, section) {
  const pointers = new Map();
  let moved = false;
  target.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    if (pointers.size === 0) moved = false;
    pointers.set(event.pointerId, event.clientX);
  });
  target.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before === undefined) {
      pointerTime = pointerTimeAt(event.clientX);
      setHovered(section ? hit(section, event.clientX, event.clientY) : null, event);
      redraw("overlay");
      return;
    }
    if (!moved && Math.abs(event.clientX - before) < 4) return;
    if (!moved) target.setPointerCapture(event.pointerId);
    moved = true;
    target.classList.add("dragging");
    setHovered(null);
    const width = Math.max(1, target.clientWidth - Geometry.gutter(target.clientWidth));
    if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const apart = Math.max(8, Math.abs(event.clientX - other));
      zoom(Math.max(8, Math.abs(before - other)) / apart, pointerTimeAt((event.clientX + other) / 2) ?? undefined);
    } else pan((before - event.clientX) / width);
    pointers.set(event.pointerId, event.clientX);
  });
  const release = (event) => {
    if (!pointers.delete(event.pointerId) || pointers.size) return;
    target.classList.remove("dragging");
    if (!moved && section && event.type === "pointerup") {
      const found = hit(section, event.clientX, event.clientY);
      if (found && !found.idle && pinned?.section === section && pinned.number === found.number) pin(null);
      else pin(found && !found.idle ? found : null);
    }
  };
  for (const type of ["pointerup", "pointercancel"]) target.addEventListener(type, release);
  target.addEventListener("pointerleave", () => {
    pointerTime = null;
    setHovered(null);
    redraw("overlay");
  });
  target.addEventListener("wheel", (event) => wheel(event, !section), { passive: false });
}

/** The wheel scrolls the page where there is something to scroll; with Ctrl, as a pinch, or on the axis it zooms. */
function wheel(event, onAxis) {
  const scrolls = document.documentElement.scrollHeight > innerHeight + 1;
  if (event.ctrlKey || event.metaKey || onAxis || (!scrolls && !event.shiftKey && Math.abs(event.deltaY) > Math.abs(event.deltaX))) {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 18 : 1;
    const speed = event.ctrlKey && Math.abs(event.deltaY) < 30 ? 0.01 : 0.002; // a pinch comes in small steps
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * lines * speed))), pointerTimeAt(event.clientX) ?? undefined);
  } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / 800);
  }
}

function keys(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("select, input")) return;
  const inPlot = event.target.closest(".plot");
  const free = inPlot || event.target === document.body;
  const actions = {
    "+": () => zoom(1 / 1.5),
    "=": () => zoom(1 / 1.5),
    "-": () => zoom(1.5),
    "−": () => zoom(1.5),
    "0": fit,
    Escape: () => pin(null),
    ArrowLeft: free && (() => (event.shiftKey ? step(inPlot, -1, 0) : pan(-0.15))),
    ArrowRight: free && (() => (event.shiftKey ? step(inPlot, 1, 0) : pan(0.15))),
    ArrowUp: free && event.shiftKey && (() => step(inPlot, 0, -1)),
    ArrowDown: free && event.shiftKey && (() => step(inPlot, 0, 1)),
  };
  const action = Object.hasOwn(actions, event.key) && actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Walks from the pinned action to the next of its device, or to the one on the neighbouring device at that time. */
function step(plot, along, across) {
  const section = sections.find((candidate) => candidate.plot === plot) ?? pinned?.section ?? sections[0];
  const { data } = section;
  if (!data?.length) return;
  let number = data.rows[data.deviceOf(0)];
  if (pinned?.section === section) {
    const device = Math.min(data.numDevices - 1, Math.max(0, data.deviceOf(pinned.number) + across));
    const [first, last] = [data.rows[device], data.rows[device + 1] - 1];
    if (last < first) return;
    number = across ? data.firstEndingAfter(device, data.start[pinned.number]) : pinned.number + along;
    number = Math.min(last, Math.max(first, number));
  }
  pin({ section, number });
  reveal(section, number);
}

// -- one action ------------------------------------------------------------------------------------------------------------------

function pin(found) {
  const sameCount = (a, b) => header.kinds[a].counted === header.kinds[b].counted;
  hovered = null;
  pinned = found && { ...found, followed: found.section.data.sharing(found.number, sameCount) };
  element("details").classList.toggle("pinned", Boolean(pinned));
  showDetails(pinned);
  if (pinned) element("details").style.transform = "none";
  redraw();
  changed();
}

function setHovered(found, event) {
  const same = found && hovered && found.section === hovered.section && found.number === hovered.number && found.idle === hovered.idle;
  hovered = found;
  if (pinned) return;
  if (!same) showDetails(found);
  if (found && event) placeDetails(event.clientX, event.clientY);
}

const nameOf = (data, n) => `${data.stage[n]}${header.kinds[data.kind[n]].letter}${data.microbatch[n]}`;

/** Which version of the weights an action uses; an update, whose number is negative, makes one. */
const weights = (version) => (version === undefined ? "" : version < 0 ? `, makes version ${-version} of the weights` : `, weights of version ${version}`);

const time = (value) => measures.time.text(value);
const memory = (value) => measures.memory.text(value);

/** "device 2", or "device 2 to host". */
function rowOf(data, row) {
  const label = data.labels[row];
  if (!label.startsWith(" ")) return label;
  let device = row;
  while (data.labels[device].startsWith(" ")) device--;
  return `${data.labels[device]} ${label.trim()}`;
}

/** All that the details show, as plain strings and numbers: what the tests compare with the simulator. */
function facts({ section, number, idle, device }) {
  const { data } = section;
  if (idle) return idleFacts(data, number, device);
  const kind = header.kinds[data.kind[number]];
  const { since, waited, need } = data.waitBefore(number);
  const forWhat = need < 0 ? "" : `, for ${nameOf(data, need)}, which ended at ${time(data.end[need])} on ${rowOf(data, data.deviceOf(need))}`;
  return {
    action: nameOf(data, number),
    words: `stage ${data.stage[number]}, ${kind.name}, ${kind.counted} ${data.microbatch[number]}${weights(data.version?.[number])}`,
    device: rowOf(data, data.deviceOf(number)),
    times: `${time(data.start[number])} to ${time(data.end[number])}, takes ${time(rounded(data.end[number] - data.start[number]))}`,
    wait: rounded(waited) > 0 ? `waited ${time(rounded(waited))}, from ${time(since)} to ${time(data.start[number])}${forWhat}` : "did not wait: it started as soon as its device was free",
    memory: `holds ${memory(data.held[number])} while it runs, ${memory(data.after[number])} after`,
    needs: [...data.needs(number)],
    neededBy: [...data.neededBy(number)],
  };
}

function idleFacts(data, number, device) {
  const ends = number >= data.rows[device + 1];
  const from = number > data.rows[device] ? data.end[number - 1] : 0;
  const to = ends ? data.makespan : data.start[number];
  const need = ends ? -1 : data.waitBefore(number).need;
  const forWhat = need < 0 ? "" : `, which needs ${nameOf(data, need)} from ${rowOf(data, data.deviceOf(need))}`;
  return {
    action: "idle",
    words: "",
    device: rowOf(data, device),
    times: `${time(from)} to ${time(to)}, ${time(rounded(to - from))} long`,
    wait: ends ? "nothing left to do: the others have not ended yet" : `until it can run ${nameOf(data, number)}${forWhat}`,
    memory: "",
    needs: [],
    neededBy: [],
  };
}

/** A difference of two floats without the noise of its last bits. */
const rounded = (value) => Number(value.toPrecision(12));

function showDetails(found) {
  const details = element("details");
  details.hidden = !found;
  if (!found) return;
  const known = facts(found);
  for (const part of ["action", "words", "device", "times", "wait", "memory"]) {
    element(`d-${part}`).textContent = part === "action" && known.words ? `${known.action}:` : known[part];
    if (part === "wait" || part === "memory") element(`d-${part}`).hidden = !known[part];
  }
  listLinks(element("d-needs"), found.section, known.needs);
  listLinks(element("d-needed"), found.section, known.neededBy);
}

function listLinks(container, section, numbers) {
  container.hidden = !numbers.length;
  const items = numbers.slice(0, 8).map((number) => {
    const item = document.createElement("li");
    const button = item.appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = nameOf(section.data, number);
    button.addEventListener("click", () => {
      pin({ section, number });
      reveal(section, number);
    });
    return item;
  });
  if (numbers.length > 8) items.push(Object.assign(document.createElement("li"), { textContent: `and ${numbers.length - 8} more` }));
  container.querySelector("ul").replaceChildren(...items);
}

function placeDetails(x, y) {
  const details = element("details");
  const { offsetWidth: width, offsetHeight: height } = details;
  const left = x + 18 + width > innerWidth - 8 ? Math.max(8, x - width - 18) : x + 18;
  const top = y + 18 + height > innerHeight - 8 ? Math.max(8, y - height - 14) : y + 18;
  details.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

// -- table and theme ------------------------------------------------------------------------------------------------------------------

function setUpTable() {
  if (!element("summary")) return;
  const body = element("summary").tBodies[0];
  const heads = [...element("summary").tHead.rows[0].cells];
  const valueOf = (row, column) => {
    const cell = row.cells[column];
    return column === 0 ? cell.textContent : Number(cell.dataset.value);
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const descending = head.ariaSort === "ascending";
      for (const other of heads) other.ariaSort = other === head ? (descending ? "descending" : "ascending") : "none";
      const compare = (a, b) => {
        const [x, y] = [valueOf(a, column), valueOf(b, column)];
        const order = column === 0 ? x.localeCompare(y, "en", { numeric: true }) : x - y;
        return (descending ? -order : order) || a.dataset.timeline - b.dataset.timeline;
      };
      body.append(...[...body.rows].sort(compare));
    });
    const most = Math.max(...[...body.rows].map((row) => valueOf(row, column)));
    for (const row of body.rows) {
      const bar = row.cells[column].querySelector(".bar");
      if (bar && most > 0) bar.style.width = `${Math.round((64 * valueOf(row, column)) / most)}px`;
    }
  });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    event.preventDefault();
    if (!row || String(getSelection())) return;
    const { root } = sections[row.dataset.timeline];
    root.scrollIntoView();
    root.classList.add("arrived");
    setTimeout(() => root.classList.remove("arrived"), 1200);
    root.querySelector(".plot").focus({ preventScroll: true });
  });
}

let themeBefore; // printing
const systemDark = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
}

function applyTheme() {
  look.refresh(isDark());
  element("theme-name").textContent = isDark() ? "Light" : "Dark";
  for (const swatch of document.querySelectorAll(".swatch[data-kind]")) {
    swatch.style.backgroundColor = look.fill[swatch.dataset.kind * 32 + 2];
  }
  redraw();
}

function setUpTools() {
  element("zoom-in").addEventListener("click", () => zoom(1 / 1.5));
  element("zoom-out").addEventListener("click", () => zoom(1.5));
  element("reset").addEventListener("click", fit);
  element("d-close").addEventListener("click", () => pin(null));
  element("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    applyTheme();
  });
  if (navigator.userAgent.includes("Mac")) element("wheel").textContent = "⌘";
  systemDark.addEventListener("change", applyTheme);
  element("density").addEventListener("change", (event) => setRows(event.target.value));
  for (const type of ["beforeprint", "afterprint"]) addEventListener(type, () => printing(type === "beforeprint"));
}

function setRows(name) {
  rowsChoice = element("density").value = name;
  for (const section of sections) section.rowsChoice = null;
  layout();
  changed();
}

/** On paper everything is painted, whole and light; what would be taller than a canvas has thin rows. */
function printing(begins) {
  const { dataset } = document.documentElement;
  if (begins) {
    themeBefore = dataset.theme;
    dataset.theme = "light";
    for (const section of sections) {
      section.rowsBefore = section.rowsChoice;
      if (!section.whole) section.rowsChoice = "overview";
    }
  } else {
    if (themeBefore) dataset.theme = themeBefore;
    else delete dataset.theme;
    for (const section of sections) section.rowsChoice = section.rowsBefore ?? null;
  }
  applyTheme();
  layout();
  for (const section of sections) if (section.data && section.whole) paint(section, wholeGeometry(section));
}
