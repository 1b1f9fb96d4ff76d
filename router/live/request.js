// One request: its timeline, its plans with their reasons, the blocks that moved for it.

import { element, groupName, requestMap, size, table } from "./block_maps.js";

const WIDTH = 1000, LEFT = 170, ROW = 22;
const NAMES = {
  router: "prepared", wait: "waits at the router", queue: "waits at the worker",
  reserve: "reserves, pulls, loads", compute: "prefill", read: "KV moves", decode: "decode",
};
const STYLES = { ...Object.fromEntries(Object.keys(NAMES).map((name) => [name, name])), wait: "queue" };

export function rowsOf(record, nowMs) {
  // Per row its label and its bars, [what, from, to] in ms since the request came. Workers tell
  // how long something took, the router when it heard of it: bars end where they were heard of.
  const zero = record.received_ms;
  const end = (record.finished_ms ?? Math.max(nowMs, zero)) - zero;
  const first = record.generations[0];
  const planned = (first ? first.started_ms : record.finished_ms ?? nowMs) - zero;
  const submitted = record.submitted_ms - zero;
  const rows = [["router", [["router", 0, submitted], ["wait", submitted, planned]]]];
  record.generations.forEach((one, place) => {
    const next = record.generations[place + 1];
    const start = one.started_ms - zero;
    const stop = next ? next.started_ms - zero : end;
    const times = one.prefill_times;
    const heard = one.prefill_ms === null ? stop : Math.min(one.prefill_ms - zero, stop);
    const bars = [];
    if (times === null) {
      bars.push(["compute", start, heard]);
    } else {
      const computed = Math.max(start, heard - times.compute_ms);
      const reserved = Math.max(start, computed - times.transfer_ms);
      bars.push(["queue", start, reserved], ["reserve", reserved, computed], ["compute", computed, heard]);
    }
    const label = record.generations.length > 1 ? ` #${place + 1}` : "";
    rows.push([`${one.prefill.worker_id}${label}`, bars]);
    if (one.prefill_ms === null) return;
    if (one.local) {
      bars.push(["decode", heard, stop]);
      return;
    }
    const moved = [];
    if (one.transfer !== null) {
      const committed = Math.min(heard + one.transfer.exposed_ms, stop);
      moved.push(["read", Math.max(start, committed - one.transfer.read_ms), committed]);
      moved.push(["decode", committed, stop]);
    }
    rows.push([`${one.decode.worker_id}${label}`, moved]);
  });
  return [rows, Math.max(end, 1)];
}

function svg(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

function timeline(record, nowMs) {
  const [rows, end] = rowsOf(record, nowMs);
  const height = rows.length * ROW + 24;
  const drawn = svg("svg", { viewBox: `0 0 ${WIDTH + LEFT + 20} ${height}`, role: "img" });
  drawn.append(svg("title", {}, "timeline of the request"));
  const at = (ms) => LEFT + (Math.min(Math.max(ms, 0), end) / end) * WIDTH;
  rows.forEach(([label, bars], row) => {
    const y = row * ROW + 4;
    drawn.append(svg("text", { x: 0, y: y + 12 }, label.slice(0, 26)));
    for (const [what, from, to] of bars) {
      if (to <= from) continue;
      const x = at(from);
      const bar = svg("rect", { x, y, width: Math.max(at(to) - x, 1), height: 14, rx: 2, class: STYLES[what] });
      bar.append(svg("title", {}, `${NAMES[what]}: ${to - from} ms`));
      drawn.append(bar);
    }
  });
  const base = height - 16;
  drawn.append(svg("line", { x1: LEFT, x2: LEFT + WIDTH, y1: base, y2: base, class: "axis" }));
  const marks = [[0, "0"], [end, `${end} ms`]];
  if (record.first_token_ms !== null) {
    const first = record.first_token_ms - record.received_ms;
    const x = at(first);
    drawn.append(svg("line", { x1: x, x2: x, y1: 0, y2: base, class: "axis" }));
    marks.push([first, `first token ${first} ms`]);
  }
  for (const [ms, text] of marks) {
    const anchor = ms > end * 0.8 ? "end" : "start";
    drawn.append(svg("text", { x: at(ms), y: height - 2, "text-anchor": anchor, class: "quiet" }, text));
  }
  const told = rows.flatMap(([label, bars]) =>
    bars.filter(([, from, to]) => to > from).map(([what, from, to]) => [label, NAMES[what], `${to - from}`]));
  return [drawn, table(["where", "what", "#ms"], told)];
}

function moved(title, transfer) {
  const parts = [element("h3", {}, title)];
  if (transfer.failed) parts.push(element("p", { className: "warn" }, `given up: ${transfer.failed}`));
  const rows = transfer.groups.map((group) => {
    const map = element("td", { className: "long" }, requestMap(group.block_map));
    const cells = [`${group.pulled_blocks} of ${group.full_blocks}`, size(group.pulled_bytes), size(group.full_bytes)];
    return element("tr", {}, element("td", {}, groupName(group)), map,
      ...cells.map((text) => element("td", { className: "number" }, text)));
  });
  if (rows.length) parts.push(table(["group", "█ pulled ▒ hit · out of the window", "#blocks", "#moved", "#all of them"], rows));
  const seconds = Math.max(transfer.read_ms, 1) / 1000;
  const bytes = transfer.groups.reduce((sum, group) => sum + group.pulled_bytes, 0);
  parts.push(element("p", { className: "quiet" },
    `${transfer.num_reads} READs in ${transfer.read_ms} ms (${size(bytes / seconds)}/s), ` +
    `readable ${transfer.exposed_ms} ms after the last offer`));
  return parts;
}

function plan(one, number) {
  const parts = [];
  const where = one.local ? one.prefill.worker_id : `${one.prefill.worker_id} → ${one.decode.worker_id}`;
  parts.push(element("h3", {}, `Plan ${number}: ${where}`));
  parts.push(element("p", {}, one.reason));
  const found = one.hit_tokens === null
    ? `expected ${one.expected_hit_tokens} tokens in the cache; no report yet`
    : `${one.hit_tokens} tokens hit (${one.expected_hit_tokens} expected), ` +
      `${one.pulled_tokens} pulled, ${one.computed_tokens} computed`;
  parts.push(element("p", { className: "quiet" }, `${found}; ${one.num_tokens} tokens came of it`));
  if (one.cause) parts.push(element("p", { className: "warn" }, `given up: ${one.cause}`));
  if (one.pull !== null) parts.push(...moved(`Prefix from ${one.pull.owner.worker_id}`, one.pull));
  if (one.transfer !== null) parts.push(...moved(`Handed over by ${one.transfer.owner.worker_id}`, one.transfer));
  return parts;
}

export function drawRequest(record, nowMs) {
  const state = record.outcome || "in progress";
  return [
    element("h2", {}, `Request ${record.request_id}`),
    element("p", {}, `${state}; ${record.num_prompt_tokens} prompt tokens, ${record.cached_tokens} of them cached; ` +
      `${record.num_tokens} tokens delivered; revision ${record.revision || "none yet"}; seed ${record.seed}`),
    ...(record.error ? [element("p", { className: "bad" }, record.error)] : []),
    ...timeline(record, nowMs),
    ...record.generations.flatMap((one, place) => plan(one, place + 1)),
  ];
}
