// What lies over the rows and moves with the pointer, drawn apart so that the rows need not be drawn again; and the time axis.

/** What lies over the rows: the time under the pointer, the action in question, and its links. */
function paintOverlay(pen, data, geometry, look, { time, number }) {
  pen.clearRect(0, 0, geometry.width, geometry.height);
  pen.save();
  pen.beginPath();
  pen.rect(geometry.left - 2, 0, geometry.plotWidth + 4, geometry.height);
  pen.clip();
  if (time !== null) {
    pen.fillStyle = look["line-strong"];
    pen.fillRect(Math.round(geometry.x(time)), 0, 1, Math.min(geometry.height, geometry.y(data.numDevices)));
  }
  if (number >= 0) {
    const links = [...data.needs(number)].slice(-200).map((need) => [need, number, look.needs, []]);
    links.push(...[...data.neededBy(number)].slice(0, 200).map((by) => [number, by, look.needed, [5, 3]]));
    for (const [from, to, colour, dash] of links) {
      outline(pen, data, geometry, from === number ? to : from, colour, 1.75);
      arrow(pen, data, geometry, from, to, colour, dash, look.page);
    }
    outline(pen, data, geometry, number, look.ink, 2);
  }
  pen.restore();
}

function boxOf(data, geometry, number) {
  const x = geometry.snapped(data.start[number]);
  const width = Math.max(2, geometry.snapped(data.end[number]) - x - 1);
  return { x, y: geometry.y(data.deviceOf(number)), width, height: geometry.density.bar };
}

function outline(pen, data, geometry, number, colour, thickness) {
  const { x, y, width, height } = boxOf(data, geometry, number);
  pen.strokeStyle = colour;
  pen.lineWidth = thickness;
  pen.beginPath();
  pen.roundRect(x - 0.5, y - 0.5, width + 1, height + 1, Math.min(3, width / 2));
  pen.stroke();
}

/** From the end of one block to the start of another, leaving and arriving at right angles to the rows. */
function arrow(pen, data, geometry, from, to, colour, dash, halo) {
  const a = boxOf(data, geometry, from);
  const b = boxOf(data, geometry, to);
  const inset = (box) => Math.min(5, box.width / 2);
  const [x0, x1] = [a.x + a.width - inset(a), b.x + inset(b)];
  const down = b.y > a.y ? 1 : -1; // along one row the line arches above it
  const y0 = down > 0 ? a.y + a.height : a.y;
  const y1 = down > 0 ? b.y : b.y === a.y ? b.y : b.y + b.height;
  const bend = b.y === a.y ? Math.min(30, 10 + Math.abs(x1 - x0) / 10) : Math.max(10, Math.abs(y1 - y0) / 2);
  const tip = b.y === a.y ? 1 : down; // the way the arrow points
  const line = new Path2D();
  line.moveTo(x0, y0);
  line.bezierCurveTo(x0, y0 + down * bend, x1, y1 - tip * bend, x1, y1 - tip * 3);
  pen.lineWidth = 4;
  pen.strokeStyle = halo;
  pen.stroke(line);
  pen.lineWidth = 1.75;
  pen.strokeStyle = colour;
  pen.setLineDash(dash);
  pen.stroke(line);
  pen.setLineDash([]);
  pen.fillStyle = colour;
  pen.beginPath();
  pen.moveTo(x1, y1 + tip);
  pen.lineTo(x1 - 4, y1 - tip * 5.5);
  pen.lineTo(x1 + 4, y1 - tip * 5.5);
  pen.fill();
}

/** The time axis, at the top left of whatever the pen draws on. */
function paintAxis(pen, geometry, look, measure, time) {
  pen.clearRect(0, 0, geometry.width, 26);
  pen.font = `11.5px ${FONT}`;
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.fillStyle = look.muted;
  pen.fillText(measure.unit ? `time, ${measure.unit}` : "time", 0, 14, geometry.left - 6);
  for (const { at, text } of measure.ticks(geometry.view, geometry.plotWidth)) {
    const x = geometry.x(at);
    const half = pen.measureText(text).width / 2;
    pen.textAlign = x + half > geometry.width ? "right" : "center";
    pen.fillText(text, x + half > geometry.width ? geometry.width : x, 13);
    pen.fillRect(Math.round(x), 21, 1, 5);
  }
  if (time === null) return;
  const label = measure.text(Number(time.toPrecision(4)));
  const half = pen.measureText(label).width / 2 + 6;
  const x = Math.min(Math.max(geometry.x(time), half), geometry.width - half);
  pen.fillStyle = look.ink;
  pen.beginPath();
  pen.roundRect(x - half, 4, half * 2, 18, 5);
  pen.fill();
  pen.fillStyle = look.page;
  pen.textAlign = "center";
  pen.fillText(label, x, 13.5);
}

