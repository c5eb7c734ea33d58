// The address keeps what is seen: the stretch of time, the pinned action and the height of the rows, behind the #. It can be copied,
// opened again and sent to somebody. What else a page has to keep joins in with `kept`.

const kept = [
  {
    write(words) {
      if (view.start !== 0 || view.end !== home) {
        words.set("from", view.start);
        words.set("to", view.end);
      }
      if (pinned) words.set("pinned", `${pinned.section.index}:${nameOf(pinned.section.data, pinned.number)}`);
      if (rowsChoice !== rowsFor(header.timelines ?? [])) words.set("rows", rowsChoice);
    },
    read(words) {
      const [from, to] = [Number(words.get("from")), Number(words.get("to"))];
      if (words.has("to") && Number.isFinite(from) && Number.isFinite(to) && from < to) setView(from, to);
      if ([...element("density").options].some((option) => option.value === words.get("rows"))) setRows(words.get("rows"));
      const [index, name] = (words.get("pinned") ?? "").split(":");
      const section = name && sections[Number(index)];
      const number = section?.data ? numberOf(section.data, name) : -1;
      if (number < 0) return;
      pin({ section, number });
      reveal(section, number);
    },
  },
];

/** The number of the action of that name, or -1. */
function numberOf(data, name) {
  for (let n = 0; n < data.length; n++) if (nameOf(data, n) === name) return n;
  return -1;
}

let linkTimer = 0;
let written = null;

/** Soon, and not at every step of a zoom: browsers refuse an address that changes too often. */
function keepLink() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => {
    const words = new URLSearchParams();
    for (const part of kept) part.write(words);
    written = String(words).replaceAll("%3A", ":");
    const bare = location.href.split("#")[0];
    history.replaceState(null, "", written ? `${bare}#${written}` : bare);
  }, 200);
}

function followLink() {
  const words = location.hash.slice(1);
  if (words !== written && words.includes("=")) for (const part of kept) part.read(new URLSearchParams(words));
  if (!listeners.includes(keepLink)) listeners.push(keepLink);
}

addEventListener("hashchange", followLink);
