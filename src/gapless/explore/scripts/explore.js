// The explorer: what the sliders say goes to the server that this page came from, and what it answers is drawn. One round of
// questions is under way at a time; a slider that has moved meanwhile starts the next, so that dragging draws all along.

const token = new URLSearchParams(location.search).get("token") ?? "";
const form = element("sliders");
const SLOW = 250; // milliseconds after which answers are drawn as they come
const PATIENCE = 1000; // milliseconds after which a slider that has moved breaks off what is under way
let underWay = false;
let movedAt = null; // when a slider was moved that nothing has been drawn for
let redrawn = null; // milliseconds from a slider's move to the picture, the last time
let linked = null; // what a link says, until its timelines are there
let answers = new Map(); // by schedule, in the order of the boxes

const ranges = [...form.querySelectorAll('input[type="range"]')];
const boxes = [...form.querySelectorAll('input[name="schedule"]')];
const numberOfSlider = (range) => form.querySelector(`[data-of="${range.name}"]`);
const isOff = (range) => range.dataset.off !== undefined && Number(numberOfSlider(range).value) === Number(range.dataset.off);

/** What is asked, without the schedule: the numbers beside the sliders, which may be larger than these go. */
function settings() {
  const words = new URLSearchParams();
  for (const range of ranges) if (!isOff(range)) words.set(range.name, numberOfSlider(range).value);
  return words;
}

function tell() {
  for (const range of ranges) {
    form.querySelector(`[data-for="${range.name}"]`).textContent = isOff(range) ? range.dataset.word : "";
  }
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  const words = [chosen.slice(0, 4).join(", ") + (chosen.length > 4 ? ` and ${chosen.length - 4} more` : "")];
  for (const [name, one] of [["devices", "device"], ["microbatches", "microbatch"]]) {
    const { value } = form.querySelector(`[data-of="${name}"]`);
    words.push(`${value} ${value === "1" ? one : name}`);
  }
  document.title = document.querySelector("h1").textContent = words.filter(Boolean).join(" · ");
}

async function ask(schedule, words, signal) {
  const asked = new URLSearchParams(words);
  asked.set("schedule", schedule);
  const response = await fetch(`answer?${asked}`, { headers: { "X-Gapless-Token": token }, cache: "no-store", signal });
  if (!response.ok) throw new Error(await response.text());
  const found = await response.json();
  return found.error ? found : { ...found, data: await readTimeline(found, found.packed) };
}

/** Asks for everything that is chosen, and draws it once it is there. */
async function round() {
  if (underWay) return;
  underWay = true;
  while (movedAt !== null) {
    const began = movedAt;
    movedAt = null;
    const words = settings();
    const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
    const found = new Map();
    const slow = setTimeout(() => draw(new Map(chosen.map((name) => [name, found.get(name) ?? answers.get(name)]))), SLOW);
    const broken = new AbortController();
    const asked = performance.now();
    const looks = setInterval(() => movedAt !== null && performance.now() - asked > PATIENCE && broken.abort(), SLOW);
    try {
      await Promise.all(chosen.map(async (name) => found.set(name, await ask(name, words, broken.signal))));
      clearTimeout(slow);
      say("");
      draw(new Map(chosen.map((name) => [name, found.get(name)])));
      if (linked) kept.at(-1).read(linked); // the view and the pinned action, now that there is something to see
      linked = null;
      await new Promise((done) => requestAnimationFrame(done));
      redrawn = performance.now() - began;
    } catch (error) {
      clearTimeout(slow);
      if (!broken.signal.aborted) say(error instanceof TypeError ? "The server does not answer: it has ended. Start `gapless explore` again, and open the address that it prints." : error.message);
    }
    clearInterval(looks);
  }
  underWay = false;
}

function draw(found) {
  answers = found;
  const good = [...found.values()].filter((answer) => answer && !answer.error);
  const limit = form.querySelector('[name="memory_limit"]');
  const shortest = Math.min(...good.map((answer) => answer.makespan));
  const longest = Math.max(0, ...good.map((answer) => answer.makespan).filter((makespan) => makespan <= 3 * shortest));
  place(good, isOff(limit) ? null : Number(numberOfSlider(limit).value), longest || null);
  good.forEach((answer, index) => {
    fill(sections[index], answer.data);
    sections[index].root.append(waysOf(answer));
  });
  const refused = [...found].filter(([, answer]) => answer?.error);
  element("refused").replaceChildren(...refused.map(([name, { error }]) => make("li", "", error.startsWith(name) ? error : `${name}: ${error}`)));
}

function make(tag, className, text = "") {
  return Object.assign(document.createElement(tag), { className, textContent: text });
}

/** How to get the same without this page. */
function waysOf({ command, python }) {
  const ways = make("div", "ways");
  for (const [kind, words] of [["command", command], ["python", python]]) {
    const line = ways.appendChild(make("div", kind));
    const button = line.appendChild(make("button", "button", "Copy"));
    button.type = "button";
    button.title = `Copy the ${kind === "command" ? "command" : "line of Python"} that gives this`;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(words);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1200);
    });
    line.appendChild(make("code", "", words)).tabIndex = 0;
  }
  return ways;
}

function moved() {
  tell();
  movedAt ??= performance.now();
  round();
  changed();
}

form.addEventListener("input", ({ target }) => {
  if (target.type === "range") numberOfSlider(target).value = target.value;
  else if (target.dataset.of) form.querySelector(`[name="${target.dataset.of}"]`).value = target.value;
  moved();
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(moved));
if (innerWidth < 640) element("panel").open = false;

// A link keeps the sliders and the boxes too.
kept.unshift({
  write(words) {
    for (const range of ranges) {
      const { value, defaultValue } = numberOfSlider(range);
      if (value !== defaultValue) words.set(range.name, value);
    }
    if (boxes.some((box) => box.checked !== box.defaultChecked)) words.set("schedules", boxes.filter((box) => box.checked).map((box) => box.value).join(","));
  },
  read(words) {
    for (const range of ranges) {
      const value = Number(words.get(range.name) ?? numberOfSlider(range).defaultValue);
      if (Number.isFinite(value)) numberOfSlider(range).value = range.value = value;
    }
    const chosen = words.get("schedules")?.split(",");
    for (const box of boxes) box.checked = chosen ? chosen.includes(box.value) : box.defaultChecked;
    linked = words;
    moved();
  },
});

if (location.hash.includes("=")) followLink();
else moved();

/** What tests look at. */
window.explorer = Object.freeze({
  idle: () => !underWay && movedAt === null && !due,
  redrawn: () => redrawn,
  names: () => sections.map((section) => section.description.name),
  refused: () => [...element("refused").children].map((item) => item.textContent),
  ways: () => [...document.querySelectorAll(".ways")].map((ways) => [...ways.querySelectorAll("code")].map((code) => code.textContent)),
});
