// Follows the router's events and shows each as a whole. The API key stays in this tab's
// sessionStorage and goes out in a header: it is in no address, no history and no log.

import { element, groupName, poolMap, table } from "./block_maps.js";
import { drawRequest } from "./request.js";

const KEY = "disagg-key";
const RETRY_MIN_MS = 1000, RETRY_MAX_MS = 10000;
const EVENT_CHARS_MAX = 32 << 20;
const $ = (id) => document.getElementById(id);
const STATES = { ready: "good", stalled: "bad", draining: "warn", starting: "warn", away: "bad" };

let chosen = null; // the request that is shown: {request_id, tenant}
let pressed = false; // a row that is redrawn between press and release would never be clicked
let following = null;

const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};
const ask = (path, signal) =>
  fetch(path, { headers: headers(), cache: "no-store", credentials: "omit", redirect: "error", signal });
const number = (value) => (value === null ? "?" : `${value}`);

function say(text, className = "") {
  Object.assign($("link"), { textContent: text, className });
}

async function* events(response) {
  // The data of each event; they are whole JSON objects, one line each.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      if (text.length > EVENT_CHARS_MAX) throw new Error("an event without an end");
      for (const part of parts) {
        const line = part.split("\n").find((one) => one.startsWith("data: "));
        if (line) yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function follow(signal) {
  let retryMs = RETRY_MIN_MS;
  while (!signal.aborted) {
    try {
      const response = await ask("v1/disagg/events", signal);
      if (response.status === 401 || response.status === 403) {
        return askForKey((await response.json()).error.message);
      }
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const body of events(response)) {
        if (signal.aborted) return;
        retryMs = RETRY_MIN_MS;
        show(body);
        say("live", "good");
      }
      say("the stream ended; connecting again", "warn");
    } catch (error) {
      if (signal.aborted) return;
      say(`${error.message}; trying again`, "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, retryMs));
    retryMs = Math.min(2 * retryMs, RETRY_MAX_MS);
  }
}

function start() {
  following?.abort();
  following = new AbortController();
  $("door").hidden = true;
  $("refusal").textContent = "";
  $("forget").hidden = !sessionStorage.getItem(KEY);
  say("connecting");
  follow(following.signal);
}

function askForKey(why) {
  $("refusal").textContent = sessionStorage.getItem(KEY) ? why : "";
  sessionStorage.removeItem(KEY);
  for (const id of ["workers", "transfers", "revisions", "requests", "request", "router"]) $(id).replaceChildren();
  chosen = null;
  $("all").hidden = true;
  $("forget").hidden = true;
  $("door").hidden = false;
  $("key").focus();
  say("a key is needed", "warn");
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  start();
});
$("forget").addEventListener("click", () => {
  following?.abort();
  sessionStorage.removeItem(KEY);
  askForKey("");
});

function show(body) {
  $("all").hidden = false;
  showRouter(body.router);
  $("workers").replaceChildren(...(body.workers.length ? body.workers.map(card) : ["no workers"]));
  $("transfers").replaceChildren(transfers(body.workers));
  $("of-revisions").hidden = body.revisions.length < 2;
  $("revisions").replaceChildren(revisions(body.revisions));
  if (!pressed) showRequests(body);
  showChosen(body);
}

function showRouter(router) {
  const state = router.status === "ok" ? (router.ready ? "ready" : "not ready") : router.status;
  const style = state === "ready" ? "good" : state === "stopping" ? "warn" : "bad";
  $("router").replaceChildren(
    `${router.router_id} · ${router.version} · ${router.model} · `,
    element("span", { className: style }, state),
    ` · ${router.num_requests} requests, ${router.num_waiting} of them wait here`,
  );
  if (router.missing.length) {
    $("router").append(element("span", { className: "bad" }, ` · no ready worker for ${router.missing.join(", ")}`));
  }
  document.title = `${router.ready ? "" : "(!) "}disagg ${router.model}`;
}

function card(worker) {
  const { pool } = worker;
  const top = element("div", { className: "top" },
    element("b", {}, worker.worker_id), worker.role,
    element("span", { className: STATES[worker.state] ?? "" }, worker.state),
    element("span", { className: "quiet", title: `epoch ${worker.epoch}` },
      `${worker.epoch.slice(0, 8)} · ${worker.revision} · ${worker.version ?? "?"} · wire ${worker.wire.join("-")}`));
  const queue = `running ${number(worker.num_running)}, waiting ${number(worker.num_waiting)}, ` +
    `${number(worker.num_prefill_tokens_queued)} tokens to prefill, ${number(worker.num_reservations)} reserved`;
  const free = `${number(pool.num_blocks_free)} of ${number(pool.num_blocks_usable)} blocks free`;
  const rows = pool.groups.map((group) =>
    [groupName(group), poolMap(group, pool.num_blocks_usable), number(group.num_held), number(group.num_cached)]);
  const made = element("article", { className: "card" }, top, element("div", {}, queue), element("div", {}, free));
  if (pool.num_blocks_quarantined) {
    made.append(element("div", { className: "bad" }, `${pool.num_blocks_quarantined} blocks in quarantine`));
  }
  if (!worker.answered) made.append(element("div", { className: "bad" }, `no answer: ${worker.error}`));
  made.append(table(["group", "pool", "#held", "#cached"], rows));
  return made;
}

function transfers(workers) {
  const pairs = new Map();
  const pair = (owner, reader) => {
    const name = JSON.stringify([owner, reader]);
    if (!pairs.has(name)) pairs.set(name, { owner, reader, leases: 0, lent: 0, inbound: 0, expected: 0, reads: 0 });
    return pairs.get(name);
  };
  for (const worker of workers) {
    for (const lease of worker.leases) {
      const one = pair(worker.worker_id, lease.reader.worker_id);
      one.leases += 1;
      one.lent += lease.num_blocks;
    }
    for (const entry of worker.inbound) {
      const one = pair(entry.owner.worker_id, worker.worker_id);
      one.inbound += 1;
      one.expected += entry.num_blocks;
      one.reads += entry.num_reads;
    }
  }
  if (!pairs.size) return element("p", { className: "quiet" }, "no leases, no transfers");
  const rows = [...pairs.values()].map((one) => [
    element("span", { className: one.reads ? "moving" : "" }, `${one.owner} ${one.reads ? "⇒" : "→"} ${one.reader}`),
    `${one.leases}`, `${one.lent}`, `${one.inbound}`, `${one.expected}`, `${one.reads}`]);
  return table(["owner → reader", "#leases", "#blocks lent", "#inbound", "#blocks expected", "#READs in flight"], rows);
}

function revisions(all) {
  return table(["revision", "#weight", "#ready", "#running", "#waiting"], all.map((one) =>
    [one.name, `${one.weight}`, `${one.num_workers_ready}/${one.num_workers}`, `${one.num_running}`, `${one.num_waiting}`]));
}

function showRequests(body) {
  const focused = document.activeElement?.dataset.request;
  $("requests").replaceChildren(requests(body.requests, body.now_ms));
  if (focused !== undefined) document.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function requests(all, nowMs) {
  if (!all.length) return element("p", { className: "quiet" }, "none yet");
  const hasTenants = all.some((one) => one.tenant);
  const rows = all.map((one) => {
    const open = element("button", { type: "button" }, one.request_id);
    open.dataset.request = `${one.tenant}/${one.request_id}`;
    const took = (one.finished_ms ?? nowMs) - one.received_ms;
    const first = one.first_token_ms === null ? "" : `${one.first_token_ms - one.received_ms}`;
    const plans = one.num_generations > 1 ? `, plan ${one.num_generations}` : "";
    const where = one.prefill === null ? "" : one.prefill === one.decode ? one.prefill : `${one.prefill} → ${one.decode}`;
    const cells = [open, ...(hasTenants ? [one.tenant] : []), one.state, `${where}${plans}`,
      `${one.num_prompt_tokens}`, `${one.num_tokens}`, first, `${took}`];
    const row = element("tr", {}, ...cells.map((cell, i) =>
      element("td", { className: i > cells.length - 5 ? "number" : "" }, cell)));
    if (chosen?.request_id === one.request_id && chosen.tenant === one.tenant) row.className = "chosen";
    row.addEventListener("click", () => choose(one, nowMs));
    return row;
  });
  const names = ["request", ...(hasTenants ? ["tenant"] : []), "state", "where",
    "#prompt tokens", "#tokens", "#first token, ms", "#ms"];
  return table(names, rows);
}

$("requests").addEventListener("pointerdown", () => { pressed = true; });
for (const end of ["pointerup", "pointercancel"]) {
  window.addEventListener(end, () => { pressed = false; });
}

function choose(one, nowMs) {
  chosen = { request_id: one.request_id, tenant: one.tenant };
  showRecord(chosen, nowMs).then(
    () => $("request").scrollIntoView({ block: "nearest" }),
    (error) => say(error.message, "bad"),
  );
}

async function showRecord(wanted, nowMs) {
  const query = wanted.tenant ? `?tenant=${encodeURIComponent(wanted.tenant)}` : "";
  const response = await ask(`v1/disagg/requests/${encodeURIComponent(wanted.request_id)}${query}`);
  const told = await response.json();
  if (wanted !== chosen) return; // another one was chosen meanwhile
  $("request").hidden = false;
  if (!response.ok) {
    $("request").replaceChildren(element("p", { className: "bad" }, told.error.message));
    wanted.over = true;
    return;
  }
  $("request").replaceChildren(...drawRequest(told, nowMs));
  wanted.over = told.finished_ms !== null && wanted.seen_ms !== undefined && nowMs - told.finished_ms > 5000;
  wanted.seen_ms = nowMs;
}

function showChosen(body) {
  if (chosen === null || chosen.over) return;
  showRecord(chosen, body.now_ms).catch((error) => say(error.message, "bad"));
}

start();
