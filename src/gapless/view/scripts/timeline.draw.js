// Drawing. A frame costs what is on the screen, not what is in the data: rows out of view are skipped, the visible part of a row
// is found by search, and a row whose actions are too thin or too many becomes one strip of pixels, each with the exact share
// of time that every kind has in it.

const MAX_BLOCKS = 4000; // drawn one by one in a frame; beyond, rows become strips
const TOP = 5; // above the first row: room for outlines
const MIN_MEAN_WIDTH = 3; // CSS pixels per action below which a row becomes a strip
const DENSITIES = {
  comfortable: { bar: 24, gap: 4, curve: 22, pad: 12 },
  compact: { bar: 14, gap: 2, curve: 11, pad: 5 },
  overview: { bar: 9, gap: 0, curve: 0, pad: 2 },
  crowded: { bar: 4, gap: 0, curve: 0, pad: 0 }, // an overview of many devices
};
const CROWD = 16; // devices
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';

const pitchOf = (density) => density.bar + density.gap + density.curve + density.pad;

function shown(value) {
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e15)) return String(Number(value.toPrecision(6)));
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1e7 ? 15 : 7 });
}

/** What numbers count. Without a unit they are exact; what was measured has a few digits that mean something. */
class Measure {
  constructor({ factor, unit }) {
    Object.assign(this, { factor, unit });
  }

  number(value) {
    if (!this.unit) return shown(value);
    return (value * this.factor).toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  text(value) {
    return this.unit ? `${this.number(value)} ${this.unit}` : shown(value);
  }

  /** Round numbers for the axis, a comfortable distance apart: each with its place in the timelines' own numbers. */
  ticks(view, width) {
    const [start, end] = [view.start * this.factor, view.end * this.factor];
    const rough = ((end - start) / Math.max(1, width)) * 90;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
    const found = [];
    for (let n = Math.ceil(start / step - 1e-9); n * step <= end + step * 1e-9; n++) {
      const value = Number((n * step).toPrecision(12));
      found.push({ at: value / this.factor, text: shown(value) });
    }
    return found;
  }
}

/** The colours that hold now: those of the style sheet, and per kind, tint and step the fill of an action. */
class Look {
  constructor(kinds, ink) {
    this.kinds = kinds;
    this.blockInk = ink;
    this.probe = document.body.appendChild(document.createElement("i"));
    this.probe.hidden = true;
  }

  refresh(dark) {
    for (const name of ["ink", "muted", "grid", "line-strong", "curve", "curve-fill", "needs", "needed", "limit", "page", "accent"]) {
      this[name] = this.#colour(`--${name}`);
    }
    this.idle = { inner: this.#hatch("inner"), outer: this.#hatch("outer") };
    this.fill = this.kinds.flatMap((kind) => (dark ? kind.dark : kind.light).flat());
    this.rgb = Int32Array.from(this.fill, (hex) => Number.parseInt(hex.slice(1), 16));
  }

  #colour(name) {
    this.probe.style.color = `var(${name})`;
    return getComputedStyle(this.probe).color;
  }

  #hatch(which) {
    const size = 5 * devicePixelRatio;
    const tile = new OffscreenCanvas(size, size);
    const pen = tile.getContext("2d");
    const plain = this.#colour(`--idle-${which}`);
    pen.fillStyle = plain;
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = this.#colour(`--idle-${which}-line`);
    pen.lineWidth = devicePixelRatio;
    for (const shift of [-size, 0, size]) {
      pen.beginPath();
      pen.moveTo(shift - 1, size + 1);
      pen.lineTo(shift + size + 1, -1);
      pen.stroke();
    }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
    return { pattern, plain };
  }
}

/** Where things are: time to x, device to y. One for each timeline and frame. */
class Geometry {
  constructor({ view, width, density, scroll, height }) {
    this.view = view;
    this.width = width;
    this.left = Geometry.gutter(width);
    this.plotWidth = Math.max(1, width - this.left - 8);
    this.perPixel = (view.end - view.start) / this.plotWidth;
    this.density = density;
    this.pitch = pitchOf(density);
    this.scroll = scroll;
    this.height = height;
  }

  static gutter(width) {
    return width < 560 ? 58 : 88;
  }

  x(time) {
    return this.left + (time - this.view.start) / this.perPixel;
  }

  snapped(time) {
    return Math.round(this.x(Math.min(Math.max(time, this.view.start - 1e3 * this.perPixel), this.view.end + 1e3 * this.perPixel)) * devicePixelRatio) / devicePixelRatio;
  }

  /** The device at a y of the canvas, and how far below the top of its row. */
  row(y) {
    const device = Math.floor((y + this.scroll - TOP) / this.pitch);
    return { device, below: y - this.y(device) };
  }

  y(device) {
    return TOP + device * this.pitch - this.scroll;
  }

  time(x) {
    return this.view.start + (x - this.left) * this.perPixel;
  }
}

/** A pixel of an image: red, green, blue and opacity in the order of their bytes. */
function pixel(rgb, share) {
  const alpha = share >= 1 ? 255 : Math.round(255 * share);
  return ((alpha << 24) | ((rgb & 255) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
}

/** Draws the rows of one timeline. `stats` counts what a frame drew. */
class Painter {
  constructor(look, measures, stats) {
    Object.assign(this, { look, measures, stats });
    this.strip = new OffscreenCanvas(1, 1);
  }

  paint(pen, data, geometry, { memoryTop, memoryLimit, followed }) {
    Object.assign(this, { pen, data, geometry, memoryTop, memoryLimit, followed });
    pen.clearRect(0, 0, geometry.width, geometry.height);
    const first = Math.max(0, Math.floor((geometry.scroll - TOP) / geometry.pitch));
    const last = Math.min(data.numDevices - 1, Math.floor((geometry.scroll + geometry.height - TOP) / geometry.pitch));
    const ranges = [];
    let total = 0;
    for (let device = first; device <= last; device++) {
      const low = data.firstEndingAfter(device, geometry.view.start);
      const after = data.firstEndingAfter(device, geometry.view.end, low);
      const high = after < data.rows[device + 1] && data.start[after] < geometry.view.end ? after + 1 : after;
      ranges.push({ device, low, high });
      total += high - low;
    }
    this.stats.rows += ranges.length;
    this.#labels(ranges);
    pen.save();
    pen.beginPath();
    pen.rect(geometry.left - 1, 0, geometry.plotWidth + 2, geometry.height);
    pen.clip();
    this.#grid();
    for (const { device } of ranges) this.#idle(device);
    const thin = ({ low, high }) => total > MAX_BLOCKS || (high - low) * MIN_MEAN_WIDTH > geometry.plotWidth;
    const strips = ranges.filter(thin);
    if (strips.length) this.#strips(strips);
    this.#blocks(ranges.filter((range) => !thin(range)));
    if (followed && strips.length) this.#followedOver(strips);
    if (geometry.density.curve) for (const range of ranges) this.#curve(range, thin(range));
    pen.fillStyle = this.look.muted;
    pen.fillRect(geometry.snapped(data.makespan), 0, 1, geometry.y(data.numDevices) - geometry.density.pad);
    pen.restore();
  }

  #labels(ranges) {
    const { pen, geometry, look, data } = this;
    const { bar, gap, curve } = geometry.density;
    const named = (label) => (geometry.width < 560 ? label.replace("device", "dev") : label);
    const every = Math.max(1, Math.ceil(16 / geometry.pitch));
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (const { device } of ranges) {
      if (device % every) continue;
      const y = geometry.y(device);
      pen.fillStyle = look.ink;
      pen.font = `${bar >= 20 ? 12.5 : 11.5}px ${FONT}`;
      pen.fillText(named(data.labels[device]), 0, y + Math.max(bar, 10) / 2 + 0.5);
      if (!curve || data.labels[device].startsWith(" ")) continue;
      const peak = data.peaks[device];
      const over = this.memoryLimit !== null && peak > this.memoryLimit;
      pen.fillStyle = over ? look.limit : look.muted;
      pen.font = `${bar >= 20 ? 11.5 : 10.5}px ${FONT}`;
      pen.fillText(`peak ${this.measures.memory.text(peak)}`, 0, y + bar + gap + curve / 2 + 1, geometry.left - 6);
    }
  }

  #grid() {
    const { pen, geometry, data } = this;
    pen.fillStyle = this.look.grid;
    const bottom = Math.min(geometry.height, geometry.y(data.numDevices));
    for (const { at } of this.measures.time.ticks(geometry.view, geometry.plotWidth)) pen.fillRect(geometry.snapped(at), 0, 1, bottom);
  }

  /** Idle until an action covers it: pale outside the device's own span, where only the makespan's bubble counts it. */
  #idle(device) {
    const { pen, geometry, data, look } = this;
    const { bar } = geometry.density;
    const span = data.spans[device];
    const paint = (idle, from, to) => {
      const x = geometry.snapped(from);
      pen.fillStyle = bar >= 8 ? idle.pattern : idle.plain;
      pen.fillRect(x, geometry.y(device), Math.max(0, geometry.snapped(to) - x), bar);
    };
    paint(look.idle.outer, 0, span ? span[0] : data.makespan);
    if (!span) return;
    paint(look.idle.inner, span[0], span[1]);
    paint(look.idle.outer, span[1], data.makespan);
  }

  /** Blocks one by one, gathered into one path per fill: much the cheapest way to draw thousands. */
  #blocks(ranges) {
    const { pen, geometry, data, look, followed } = this;
    const { bar } = geometry.density;
    const hair = 1 / devicePixelRatio;
    const paths = [new Map(), new Map()]; // in full colour, and faded
    for (const { device, low, high } of ranges) {
      const y = geometry.y(device);
      this.stats.blocks += high - low;
      for (let n = low; n < high; n++) {
        const x = geometry.snapped(data.start[n]);
        const width = Math.max(hair, geometry.snapped(data.end[n]) - x);
        const fills = paths[followed && !followed.includes(n) ? 1 : 0];
        let path = fills.get(data.shade[n]);
        if (!path) fills.set(data.shade[n], (path = new Path2D()));
        if (data.start[n] === data.end[n]) path.rect(x - 1, y - 2, 2, bar + 4);
        else if (width > 6 && bar >= 8) path.roundRect(x, y, width - 1, bar, 3);
        else path.rect(x, y, width > 3 ? width - 1 : width, bar);
      }
    }
    paths.forEach((fills, faded) => {
      pen.globalAlpha = faded ? 0.22 : 1;
      for (const [shade, path] of fills) {
        pen.fillStyle = look.fill[shade];
        pen.fill(path);
      }
    });
    pen.globalAlpha = 1;
    if (bar >= 12) this.#numbers(ranges);
  }

  #numbers(ranges) {
    const { pen, geometry, data, look, followed } = this;
    const { bar } = geometry.density;
    pen.font = `600 ${bar >= 20 ? 11.5 : 10}px ${FONT}`;
    pen.textAlign = "center";
    pen.fillStyle = look.blockInk;
    const digit = bar >= 20 ? 7 : 6;
    const needed = (data.digits * digit + 2.5) * geometry.perPixel; // the same for all, so that none stands out
    const [from, to] = [geometry.left, geometry.left + geometry.plotWidth];
    for (const { device, low, high } of ranges) {
      for (let n = low; n < high; n++) {
        const length = data.end[n] - data.start[n];
        if (length < needed || (followed && !followed.includes(n))) continue;
        const number = String(data.microbatch[n]);
        const text = length > 96 * geometry.perPixel ? `${data.stage[n]}${look.kinds[data.kind[n]].letter}${number}` : number;
        // In view as long as there is room for it beside the edge.
        const left = Math.max(geometry.snapped(data.start[n]), from);
        const right = Math.min(geometry.snapped(data.end[n]) - 1, to);
        if (right - left >= text.length * digit) pen.fillText(text, (left + right) / 2, geometry.y(device) + bar / 2 + 0.75);
      }
    }
  }

  #strips(ranges) {
    const { pen, geometry } = this;
    const columns = Math.ceil(geometry.plotWidth);
    if (this.strip.width !== columns || this.strip.height < ranges.length) {
      this.strip = new OffscreenCanvas(columns, Math.max(ranges.length, this.strip.height));
    }
    const image = new ImageData(columns, ranges.length);
    const pixels = new Uint32Array(image.data.buffer);
    ranges.forEach(({ device, low }, row) => this.#pixels(pixels.subarray(row * columns, (row + 1) * columns), device, low));
    const stripPen = this.strip.getContext("2d");
    stripPen.putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.globalAlpha = this.followed ? 0.25 : 1;
    ranges.forEach(({ device }, row) => {
      pen.drawImage(this.strip, 0, row, columns, 1, geometry.left, geometry.y(device), columns, geometry.density.bar);
    });
    pen.globalAlpha = 1;
    this.stats.pixels += columns * ranges.length;
  }

  /** One row as pixels: the mean colour of what runs in each, as opaque as the share of time in which anything runs. */
  #pixels(pixels, device, low) {
    const { data, geometry, look } = this;
    const { start, end, kind, shade } = data;
    const rowEnd = data.rows[device + 1];
    const step = geometry.perPixel;
    const sums = data.busySums();
    let i = low;
    for (let p = 0; p < pixels.length; p++) {
      const from = geometry.view.start + p * step;
      const to = from + step;
      const j = i === rowEnd || end[i] > to ? i : data.firstEndingAfter(device, to, i);
      if (i === j) {
        // All of the pixel lies in one action, or in the idle time before it.
        const busy = i < rowEnd ? to - Math.max(start[i], from) : 0;
        if (busy > 0) pixels[p] = pixel(look.rgb[shade[i]], busy / step);
        continue;
      }
      let busy = 0;
      let red = 0;
      let green = 0;
      let blue = 0;
      for (let s = 0; s < sums.length; s++) {
        const { of, before } = sums[s];
        let time = before[j] - before[i];
        if (kind[i] === of && start[i] < from) time -= from - start[i];
        if (j < rowEnd && kind[j] === of && start[j] < to) time += to - start[j];
        if (time <= 0) continue;
        const rgb = look.rgb[(of << 5) | 3];
        busy += time;
        red += time * (rgb >> 16);
        green += time * ((rgb >> 8) & 255);
        blue += time * (rgb & 255);
      }
      if (busy > 0) pixels[p] = pixel(((red / busy) << 16) | ((green / busy) << 8) | (blue / busy), busy / step);
      i = j;
    }
  }

  /** The followed microbatch drawn over faded strips. */
  #followedOver(strips) {
    const { pen, geometry, data, followed } = this;
    const devices = new Set(strips.map(({ device }) => device));
    for (const n of followed.numbers) {
      const device = data.deviceOf(n);
      if (!devices.has(device) || data.end[n] < geometry.view.start || data.start[n] > geometry.view.end) continue;
      const x = geometry.x(data.start[n]);
      pen.fillStyle = this.look.fill[data.shade[n]];
      pen.fillRect(x, geometry.y(device), Math.max(1.5, geometry.x(data.end[n]) - x), geometry.density.bar);
      this.stats.blocks++;
    }
  }

  #curve({ device, low, high }, thin) {
    if (this.data.labels[device].startsWith(" ")) return; // what a device has in its host's memory is a figure
    const { pen, geometry, data, look } = this;
    const { bar, gap, curve } = geometry.density;
    const bottom = geometry.y(device) + bar + gap + curve;
    const level = (value) => bottom - (value / (this.memoryTop || 1)) * (curve - 1);
    const outline = new Path2D();
    const from = Math.max(geometry.x(0), geometry.left - 2);
    const to = Math.min(geometry.x(data.makespan), geometry.left + geometry.plotWidth + 2);
    let held = low > data.rows[device] ? data.after[low - 1] : 0;
    outline.moveTo(from, level(held));
    if (thin) held = this.#thinCurve(outline, device, low, level, held);
    else {
      for (let n = low; n < high; n++) {
        const x = geometry.snapped(data.start[n]);
        if (n === low || data.start[n] !== data.end[n - 1]) outline.lineTo(x, level(held));
        outline.lineTo(x, level(data.held[n]));
        const after = geometry.snapped(data.end[n]);
        outline.lineTo(after, level(data.held[n]));
        held = data.after[n];
        // What is given back and taken again in the same moment is no dip.
        if (n + 1 === high || data.start[n + 1] !== data.end[n]) outline.lineTo(after, level(held));
      }
    }
    outline.lineTo(Math.max(from, to), level(held));
    const area = new Path2D(outline);
    area.lineTo(Math.max(from, to), bottom);
    area.lineTo(from, bottom);
    pen.fillStyle = look["curve-fill"];
    pen.fill(area);
    pen.strokeStyle = look.curve;
    pen.lineWidth = 1;
    pen.stroke(outline);
    this.#limitAndPeak(device, level);
  }

  /** Per pixel the most that is held in it, so that no peak is lost between pixels. */
  #thinCurve(outline, device, low, level, before) {
    const { geometry, data } = this;
    const rowEnd = data.rows[device + 1];
    let held = before;
    let i = low;
    for (let p = 0; p < geometry.plotWidth; p++) {
      const to = geometry.view.start + (p + 1) * geometry.perPixel;
      const j = data.firstEndingAfter(device, to, i);
      const running = j < rowEnd && data.start[j] < to ? j + 1 : j;
      const most = running > i ? data.mostHeld(device, i, running) : held;
      outline.lineTo(geometry.left + p, level(most));
      if (j > i) held = data.after[j - 1];
      if (running > j) held = data.held[j];
      i = j;
      if (i >= rowEnd) return held;
    }
    return held;
  }

  #limitAndPeak(device, level) {
    const { pen, geometry, data, look } = this;
    if (this.memoryLimit !== null) {
      pen.strokeStyle = look.limit;
      pen.setLineDash([4, 3]);
      pen.beginPath();
      pen.moveTo(geometry.left, Math.round(level(this.memoryLimit)) + 0.5);
      pen.lineTo(Math.min(geometry.x(data.makespan), geometry.left + geometry.plotWidth), Math.round(level(this.memoryLimit)) + 0.5);
      pen.stroke();
      pen.setLineDash([]);
    }
    const peak = data.peakAt(device);
    if (peak < 0) return;
    const over = this.memoryLimit !== null && data.held[peak] > this.memoryLimit;
    pen.fillStyle = over ? look.limit : look.ink;
    pen.beginPath();
    pen.arc(geometry.x(data.start[peak]), level(data.held[peak]), 2.25, 0, 7);
    pen.fill();
  }
}

/** The pen of a canvas, which is resized to whole device pixels where needed; its unit is the CSS pixel. */
function penOf(canvas, width, height) {
  const [w, h] = [Math.round(width * devicePixelRatio), Math.round(height * devicePixelRatio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  return pen;
}
