// Reading the columns, and the questions that drawing asks of them. Actions are numbered device by device, in the order of
// the rows, so that row d is the run of numbers rows[d] to rows[d + 1] - 1, ordered by time.
"use strict";

const CHILDREN = 16; // of a node in the pyramid of memory maxima

/** Base64 to the bytes that were compressed. */
async function inflate(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

/** A float64 column as it is; an int32 column is made of differences, scaled by a power of two, so that nothing is rounded. */
function readColumn(buffer, offset, { type, length, scale }) {
  if (type === "float64") return new Float64Array(buffer, offset, length);
  const differences = new Int32Array(buffer, offset, length);
  const exact = scale === 1 ? new Int32Array(length) : new Float64Array(length);
  for (let i = 0, sum = 0; i < length; i++) exact[i] = (sum += differences[i]) / scale;
  return exact;
}

async function readTimeline(description, text) {
  const buffer = await inflate(text);
  const column = {};
  let offset = 0;
  for (const described of description.columns) {
    column[described.name] = readColumn(buffer, offset, described);
    offset += described.length * (described.type === "float64" ? 8 : 4);
    offset += -offset & 7;
  }
  return new TimelineData(description, column);
}

class TimelineData {
  constructor(description, column) {
    this.name = description.name;
    this.rows = Int32Array.from(description.rows);
    this.numDevices = description.rows.length - 1;
    this.length = description.rows[this.numDevices];
    this.makespan = description.makespan;
    this.spans = description.spans;
    this.peaks = description.peaks;
    this.labels = description.labels; // of the rows: devices, and their copies to the host and back
    this.start = column.start;
    this.end = column.end;
    this.held = column.held;
    this.after = column.after;
    this.stage = column.stage;
    this.microbatch = column.microbatch;
    this.version = column.version; // of the weights, where they are updated on the way
    this.kind = Uint8Array.from(column.kind);
    this.shade = this.#shades(description);
    this.firstNeed = new Int32Array(this.length + 1);
    this.need = column.needBack; // turned in place from "how far back" into the number itself
    for (let n = 0, at = 0; n < this.length; n++) {
      for (const to = at + column.needCount[n]; at < to; at++) this.need[at] = n - this.need[at];
      this.firstNeed[n + 1] = at;
    }
    this.digits = String(this.microbatch.reduce((most, number) => Math.max(most, number), 0)).length;
    this.sums = null;
    this.pyramids = [];
    this.inverse = null;
  }

  /** Per action its place in the list of fills: by kind, then by which of its device's stages, then by microbatch. */
  #shades({ stages, tints }) {
    const shade = new Uint16Array(this.length);
    for (let device = 0; device < this.numDevices; device++) {
      const tint = new Map(stages[device].map((stage, place) => [stage, tints[device][place]]));
      for (let n = this.rows[device]; n < this.rows[device + 1]; n++) {
        shade[n] = (this.kind[n] << 5) | ((tint.get(this.stage[n]) ?? 0) << 3) | (this.microbatch[n] & 7);
      }
    }
    return shade;
  }

  deviceOf(number) {
    let low = 0;
    let high = this.numDevices - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.rows[middle] <= number) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The first action of a row, from number `from` on, that ends after `time`; the row's end if there is none. */
  firstEndingAfter(device, time, from = this.rows[device]) {
    const { end } = this;
    let high = this.rows[device + 1];
    let low = from;
    // Gallop first: neighbouring pixels ask for neighbouring actions.
    for (let stride = 1; low + stride < high; stride *= 2) {
      if (end[low + stride] > time) {
        high = low + stride;
        break;
      }
      low += stride;
    }
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The action that runs on a device at a time, or -1. Actions that take no time are found within `reach` of it. */
  actionAt(device, time, reach = 0) {
    if (device < 0 || device >= this.numDevices) return -1;
    const first = this.rows[device];
    const n = this.firstEndingAfter(device, time);
    for (let m = n - 1; m >= first && this.end[m] >= time - reach; m--) if (this.start[m] === this.end[m]) return m;
    for (let m = n; m < this.rows[device + 1] && this.start[m] <= time + reach; m++) if (this.start[m] === this.end[m]) return m;
    return n < this.rows[device + 1] && this.start[n] <= time ? n : -1;
  }

  needs(number) {
    return this.need.subarray(this.firstNeed[number], this.firstNeed[number + 1]);
  }

  /** What needs this action: the same numbers the other way round, turned on first use. */
  neededBy(number) {
    if (!this.inverse) {
      const first = new Int32Array(this.length + 1);
      for (const need of this.need) first[need + 1]++;
      for (let n = 0; n < this.length; n++) first[n + 1] += first[n];
      const next = first.slice();
      const by = new Int32Array(this.need.length);
      for (let n = 0; n < this.length; n++) for (const need of this.needs(n)) by[next[need]++] = n;
      this.inverse = { first, by };
    }
    return this.inverse.by.subarray(this.inverse.first[number], this.inverse.first[number + 1]);
  }

  /**
   * How long the device stood idle before this action, and the need it waited for: of those on other devices the last to end.
   * A need on its own device can't be it, for the device ran that before.
   */
  waitBefore(number) {
    const device = this.deviceOf(number);
    const since = number > this.rows[device] ? this.end[number - 1] : 0;
    let last = -1;
    for (const need of this.needs(number)) {
      const elsewhere = need < this.rows[device] || need >= this.rows[device + 1];
      if (elsewhere && (last < 0 || this.end[need] > this.end[last])) last = need;
    }
    return { since, waited: this.start[number] - since, need: last };
  }

  /** The actions that work on the same microbatch (or minibatch) as this one. */
  sharing(number, sameCount) {
    const found = [];
    const [microbatch, kind] = [this.microbatch[number], this.kind[number]];
    for (let n = 0; n < this.length; n++) if (this.microbatch[n] === microbatch && sameCount(this.kind[n], kind)) found.push(n);
    const members = new Set(found);
    return { numbers: found, includes: (n) => members.has(n) };
  }

  /** Per kind that occurs, the busy time of all actions before number n: that of any stretch is a difference of two. */
  busySums() {
    if (!this.sums) {
      const { kind, start, end, length } = this;
      this.sums = [...new Set(kind)].map((of) => {
        const before = new Float64Array(length + 1);
        for (let n = 0; n < length; n++) before[n + 1] = before[n] + (kind[n] === of ? end[n] - start[n] : 0);
        return { of, before };
      });
    }
    return this.sums;
  }

  /** The most a device holds while the actions from `low` to `high` - 1 run, from a pyramid of maxima that is built on first use. */
  mostHeld(device, low, high) {
    const levels = (this.pyramids[device] ??= this.#pyramid(device));
    const first = this.rows[device];
    let most = 0;
    let a = low - first;
    let b = high - first;
    for (const level of levels) {
      while (a < b && a % CHILDREN) most = Math.max(most, level[a++]);
      while (a < b && b % CHILDREN) most = Math.max(most, level[--b]);
      if (a >= b) break;
      a /= CHILDREN;
      b /= CHILDREN;
    }
    return most;
  }

  /** The first action during which a device holds the most. */
  peakAt(device) {
    this.peakNumbers ??= new Array(this.numDevices);
    const found = (this.peakNumbers[device] ??= this.held.subarray(this.rows[device], this.rows[device + 1]).indexOf(this.peaks[device]));
    return found < 0 ? -1 : this.rows[device] + found;
  }

  #pyramid(device) {
    const levels = [this.held.subarray(this.rows[device], this.rows[device + 1])];
    while (levels.at(-1).length > 1) {
      const below = levels.at(-1);
      const level = new Float64Array(Math.ceil(below.length / CHILDREN));
      for (let i = 0; i < below.length; i++) level[Math.floor(i / CHILDREN)] = Math.max(level[Math.floor(i / CHILDREN)], below[i]);
      levels.push(level);
    }
    return levels;
  }
}
