// Elements and maps of KV blocks. Whatever comes from the fleet becomes text, never markup.

const CELLS = 40;
const SIGNS_MAX = 4096;
const SIGNS = { p: "█", h: "▒", ".": "·", n: "▢" };
const CLASSES = { p: "p", h: "h", ".": "null", n: "n" };
const KINDS = { full_attention: "full", sliding_window: "window", chunked_local: "chunk" };

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function table(names, rows) {
  // Names that begin with # are of numbers.
  const isNumber = names.map((name) => name.startsWith("#"));
  const cell = (tag, content, place) =>
    element(tag, { className: isNumber[place] ? "number" : "" }, content);
  const head = element("tr", {}, ...names.map((name, i) => cell("th", name.replace("#", ""), i)));
  const body = rows.map((row) => {
    const made = row instanceof Element ? row : element("tr", {}, ...row.map((one, i) => cell("td", one, i)));
    return made;
  });
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

export function groupName(group) {
  const name = KINDS[group.kind] ?? group.kind;
  return `${group.group} ${name}${group.window_tokens ? ` ${group.window_tokens}` : ""}`;
}

export function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 1 << 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;
}

export function poolMap(group, usable) {
  // A group's part of its worker's pool; whatever there is has a sign.
  const map = element("span", { className: "map" });
  if (group.num_held === null || group.num_cached === null || !usable) {
    map.append("?");
    return map;
  }
  const held = Math.min(CELLS, Math.ceil((group.num_held * CELLS) / usable));
  const cached = Math.min(CELLS - held, Math.ceil((group.num_cached * CELLS) / usable));
  map.append(
    element("span", { className: "held" }, "█".repeat(held)),
    element("span", { className: "cached" }, "▒".repeat(cached)),
    element("span", { className: "rest" }, "·".repeat(CELLS - held - cached)),
  );
  return map;
}

export function requestMap(blocks) {
  // A sign per block of a prompt, as reported: pulled, hit, out of the window, new.
  const map = element("span", { className: "map" });
  for (const run of blocks.slice(0, SIGNS_MAX).match(/p+|h+|\.+|n+/g) ?? []) {
    map.append(element("span", { className: CLASSES[run[0]] }, SIGNS[run[0]].repeat(run.length)));
  }
  if (blocks.length > SIGNS_MAX) map.append(` and ${blocks.length - SIGNS_MAX} more`);
  return map;
}
