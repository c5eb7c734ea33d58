// Saving what is shown, at its zoom and in its colours, as a picture: title, time axis and every timeline, in the window or not.

const MARGIN = 16;
const HEAD = 30; // of a timeline: its name and figures
const MOST_IN_SVG = 50_000; // actions
const LARGEST = { side: 16_000, area: 100e6 }; // of a picture in pixels, that browsers still make

/** Where the parts of the picture are. */
function arrange() {
  const width = element("axis").clientWidth;
  const top = MARGIN + 58;
  let bottom = top + 26;
  const parts = sections.map((section) => {
    const part = { section, top: bottom + HEAD, geometry: new Geometry({ view, width, density: densityOf(section), scroll: 0, height: heightOf(section) }) };
    bottom += HEAD + heightOf(section) + 6;
    return part;
  });
  const axis = new Geometry({ view, width, density: DENSITIES.comfortable, scroll: 0, height: 26 });
  return { axis, top, parts, width: width + 2 * MARGIN, height: bottom + MARGIN };
}

const titleText = () => document.querySelector("h1").textContent;
const subtitleText = () => document.querySelector(".top p").textContent;
const figuresText = (section) => section.description.figures.map((words) => words.join(" ")).join(" · ");

async function savePng() {
  const { axis, top, parts, width, height } = arrange();
  const scale = Math.min(2, LARGEST.side / height, LARGEST.side / width, Math.sqrt(LARGEST.area / (width * height)));
  if (scale < 0.25) return say("This is too tall for one picture: choose thinner rows first.");
  const sheet = (w, h) => {
    const canvas = new OffscreenCanvas(Math.ceil(w * scale), Math.ceil(h * scale));
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return pen;
  };
  const pen = sheet(width, height);
  const stick = (part, x, y) => pen.drawImage(part.canvas, x, y, part.canvas.width / scale, part.canvas.height / scale);
  const write = (text, x, y, font, colour) => {
    Object.assign(pen, { font: `${font} ${FONT}`, fillStyle: colour, textBaseline: "middle" });
    pen.fillText(text, x, y, width - x - MARGIN);
    return x + pen.measureText(text).width;
  };
  pen.fillStyle = look.page;
  pen.fillRect(0, 0, width, height);
  write(titleText(), MARGIN, MARGIN + 14, "650 20px", look.ink);
  write(subtitleText(), MARGIN, MARGIN + 38, "13px", look.muted);
  const scalePen = sheet(axis.width, 26);
  paintAxis(scalePen, axis, look, measures.time, null);
  stick(scalePen, MARGIN, top);
  const counted = { ...stats };
  for (const { section, top: y, geometry } of parts) {
    const after = write(section.description.name, MARGIN, y - 13, "650 15px", look.ink);
    write(figuresText(section), after + 14, y - 13, "13px", look.muted);
    if (!section.data) continue;
    const rows = sheet(geometry.width, geometry.height);
    painter.paint(rows, section.data, geometry, { memoryTop, memoryLimit, followed: pinned?.section === section ? pinned.followed : null });
    stick(rows, MARGIN, y);
  }
  Object.assign(stats, counted);
  download(await pen.canvas.convertToBlob({ type: "image/png" }), "png");
}

function saveSvg() {
  const { axis, top, parts, width, height } = arrange();
  const inView = (data) => data.start.reduce((sum, start, n) => sum + (start <= view.end && data.end[n] >= view.start), 0);
  const count = sections.reduce((sum, { data }) => sum + (data ? inView(data) : 0), 0);
  if (count > MOST_IN_SVG) return say(`${count.toLocaleString("en")} actions are in view, and an SVG takes ${MOST_IN_SVG.toLocaleString("en")}: zoom in, or save a PNG.`);
  const words = (value, x, y, size, colour, more = "") =>
    `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" font-size="${size}" fill="${colour}" ${more}>${escaped(value)}</text>`;
  const strong = 'font-weight="650"';
  const lines = [
    `<rect width="100%" height="100%" fill="${look.page}"/>`,
    words(titleText(), MARGIN, MARGIN + 20, 20, look.ink, strong),
    words(subtitleText(), MARGIN, MARGIN + 42, 13, look.muted),
    words(measures.time.unit ? `time, ${measures.time.unit}` : "time", MARGIN, top + 17, 11.5, look.muted),
    ...measures.time.ticks(view, axis.plotWidth).map(({ at, text }) => words(text, MARGIN + axis.x(at), top + 17, 11.5, look.muted, 'text-anchor="middle"')),
  ];
  for (const { section, top: y, geometry } of parts) {
    const { name } = section.description;
    lines.push(`<text x="${MARGIN}" y="${y - 9}" font-size="15" ${strong} fill="${look.ink}">${escaped(name)}<tspan dx="14" font-size="13" font-weight="400" fill="${look.muted}">${escaped(figuresText(section))}</tspan></text>`);
    if (section.data) lines.push(`<g transform="translate(${MARGIN} ${y})">`, ...svgRows(section.data, geometry, words), "</g>");
  }
  const space = element("theme").querySelector("svg").namespaceURI;
  const picture = `<svg xmlns="${space}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${escaped(FONT)}"><title>${escaped(titleText())}</title>\n${lines.join("\n")}\n</svg>\n`;
  download(new Blob([picture], { type: "image/svg+xml" }), "svg");
}

function* svgRows(data, geometry, words) {
  const { bar, gap, curve } = geometry.density;
  const { left, plotWidth } = geometry;
  const rect = (from, to, y, fill, inset = 0) => {
    const [x, width] = [geometry.snapped(from), geometry.snapped(to) - geometry.snapped(from)];
    return `<rect x="${x}" y="${y}" width="${Math.max(0.5, width - (width > 3 ? inset : 0))}" height="${bar}" fill="${fill}"/>`;
  };
  const every = Math.max(1, Math.ceil(16 / geometry.pitch));
  for (let device = 0; device < data.numDevices; device++) {
    const y = geometry.y(device);
    if (device % every === 0) yield words(`device ${device}`, 0, y + Math.max(bar, 10) / 2 + 4, 11.5, look.ink);
    if (curve) yield words(`peak ${measures.memory.text(data.peaks[device])}`, 0, y + bar + gap + curve / 2 + 4, 10.5, look.muted);
    // A picture in the picture, which cuts off what is out of view.
    yield `<svg x="${left}" width="${plotWidth}" height="${geometry.height}" viewBox="${left} 0 ${plotWidth} ${geometry.height}">`;
    const span = data.spans[device];
    yield rect(0, data.makespan, y, look.idle.outer.plain);
    if (span) yield rect(...span, y, look.idle.inner.plain);
    const [low, last] = [data.firstEndingAfter(device, view.start), data.rows[device + 1]];
    const curved = [];
    for (let n = low; n < last && data.start[n] <= view.end; n++) {
      yield rect(data.start[n], data.end[n], y, look.fill[data.shade[n]], 1);
      const text = String(data.microbatch[n]);
      const room = (data.end[n] - data.start[n]) / geometry.perPixel;
      if (bar >= 12 && room >= text.length * 7 + 3) yield words(text, (geometry.x(data.start[n]) + geometry.x(data.end[n])) / 2, y + bar / 2 + 4, bar >= 20 ? 11.5 : 10, look.blockInk, 'text-anchor="middle" font-weight="600"');
      const level = (held) => (y + bar + gap + curve - (held / (memoryTop || 1)) * (curve - 1)).toFixed(1);
      curved.push(`H${geometry.x(data.start[n]).toFixed(1)}V${level(data.held[n])}H${geometry.x(data.end[n]).toFixed(1)}V${level(data.after[n])}`);
    }
    const floor = y + bar + gap + curve;
    if (curve && curved.length) yield `<path d="M${geometry.x(data.start[low]).toFixed(1)} ${floor}${curved.join("")}V${floor}Z" fill="${look["curve-fill"]}" stroke="${look.curve}"/>`;
    yield "</svg>";
  }
}

/** Text for XML: no markup, none of the characters that XML forbids. */
function escaped(text) {
  const named = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd").replace(/[&<>"]/g, (letter) => named[letter]);
}

function download(blob, ending) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${titleText().replace(/[^\p{L}\p{N}.]+/gu, "-").replace(/^[-.]+|-+$/g, "").slice(0, 80) || "timelines"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** One sentence at the top of the page. */
function say(sentence) {
  element("notice").textContent = sentence;
  element("notice").hidden = !sentence;
  if (sentence) element("notice").scrollIntoView({ block: "nearest" });
}

element("save-png").addEventListener("click", savePng);
element("save-svg").addEventListener("click", saveSvg);
