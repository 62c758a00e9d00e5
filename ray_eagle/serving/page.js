"use strict";
const $ = (id) => document.getElementById(id);
const base = location.pathname.replace(/\/?$/, "/");
const ROWS_KEPT = 200;
let engine = "reference";
let running = null;
let run = null;

function authorised(headers) {
  const token = $("token").value.trim();
  return token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
}

async function failure(response) {
  let text = `${response.status} ${response.statusText}`;
  try { text = (await response.json()).error || text; } catch { /* no JSON: the status says it */ }
  if (response.status === 401) { text = "This server asks for its access token: enter it above and press Run."; $("token").focus(); }
  return new Error(text);
}

async function* linesOf(body, signal) {
  const headers = authorised({ "Content-Type": "application/json", Accept: "application/x-ndjson" });
  const response = await fetch(base + "generate", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
  }
}

function token(piece, kind, title) {
  const span = document.createElement(kind === "rejected" ? "del" : "span");
  span.className = `tok ${kind}`;
  if (piece.special) span.classList.add("special");
  // a line that was never written must not break the text
  if (kind === "rejected") span.textContent = piece.text.replaceAll("\n", "⏎");
  else span.textContent = piece.text;
  if (kind !== "rejected" && piece.text.includes("\n")) span.classList.add("break");
  span.dataset.kind = kind;
  span.dataset.id = piece.id;
  span.title = `${title}, token ${piece.id}`;
  return span;
}

function chip(piece, kind) {
  const span = token(piece, kind, kind);
  const mark = document.createElement("span");
  mark.className = "mark";
  mark.textContent = { accepted: "✓", rejected: "✗", bonus: "+" }[kind];
  span.textContent = piece.text.trim() === "" ? JSON.stringify(piece.text).slice(1, -1).replaceAll(" ", "␣") || "·" : piece.text;
  span.classList.remove("break");
  span.prepend(mark);
  return span;
}

function cell(row, kind, ...children) {
  const td = document.createElement("td");
  td.className = kind;
  td.append(...children);
  row.append(td);
}

function show(pass) {
  const first = run.tokens.length === 0;
  const kept = pass.drafted.slice(0, pass.accepted);
  const rejected = pass.drafted.slice(pass.accepted);
  const all = pass.bonus ? [...kept, pass.bonus] : kept;
  const inside = all.length - pass.beyond;
  const text = document.createDocumentFragment();
  kept.forEach((piece, i) => {
    const span = token(piece, "accepted", `accepted draft ${i + 1} of pass ${run.passes + 1}`);
    if (i >= inside) span.classList.add("beyond");
    text.append(span);
  });
  rejected.forEach((piece, i) => text.append(token(piece, "rejected", `rejected draft ${pass.accepted + i + 1} of pass ${run.passes + 1}`)));
  if (pass.bonus) {
    const span = token(pass.bonus, first ? "first" : "bonus", first ? "the prompt's own token" : `bonus of pass ${run.passes + 1}`);
    if (kept.length >= inside) span.classList.add("beyond");
    text.append(span);
  }
  const output = $("output");
  const atEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  output.append(text);
  if (atEnd) output.scrollTop = output.scrollHeight;
  run.tokens.push(...all.slice(0, inside).map((piece) => piece.id));
  $("tokens").value = run.tokens.length;
  if (pass.tokens_per_second !== null) $("rate").value = pass.tokens_per_second.toFixed(1);
  if (first) return;
  run.passes += 1;
  run.most = Math.max(run.most, pass.drafted.length);
  for (let k = 0; k < pass.drafted.length; k++) run.reached[k] = (run.reached[k] || 0) + (pass.accepted > k ? 1 : 0);
  $("passes").value = run.passes;
  if (pass.acceptance_length !== null) $("tau").value = pass.acceptance_length.toFixed(2);
  if (run.live) $("tau-most").textContent = `of at most ${run.most + 1} a pass`;
  bars();
  strip(pass);
  const row = document.createElement("tr");
  cell(row, "", String(run.passes));
  cell(row, "", ...kept.map((piece) => chip(piece, "accepted")), ...rejected.map((piece) => chip(piece, "rejected")));
  cell(row, "", ...(pass.bonus ? [chip(pass.bonus, "bonus")] : []));
  cell(row, "num", `${pass.accepted + 1} of ${pass.drafted.length + 1}`);
  cell(row, "num", (1000 * pass.seconds).toFixed(1));
  $("rows").prepend(row);
  while ($("rows").children.length > ROWS_KEPT) $("rows").lastChild.remove();
}

function bars() {
  const list = $("positions");
  while (list.children.length < run.reached.length) {
    const item = document.createElement("li");
    item.innerHTML = '<span></span><div class="track"><div class="fill"></div></div><b></b>';
    item.firstChild.textContent = list.children.length + 1;
    list.append(item);
  }
  run.reached.forEach((count, k) => {
    const share = Math.round((100 * count) / run.passes);
    list.children[k].querySelector(".fill").style.width = `${share}%`;
    list.children[k].querySelector("b").textContent = `${share}%`;
  });
}

function strip(pass) {
  const column = document.createElement("i");
  const part = (kind) => { const b = document.createElement("b"); b.className = kind; column.append(b); };
  for (let k = pass.accepted; k < pass.drafted.length; k++) part("r");
  part("b");
  for (let k = 0; k < pass.accepted; k++) part("a");
  $("strip").append(column);
}

function reset() {
  run = { tokens: [], passes: 0, most: 0, reached: [], live: true };
  for (const id of ["output", "strip", "rows", "positions"]) $(id).replaceChildren();
  for (const id of ["tau", "rate", "speedup", "same"]) $(id).value = "–";
  for (const id of ["passes", "tokens"]) $(id).value = "0";
  $("plain-rate").textContent = "plain: –";
  $("tau-most").textContent = "tokens a pass";
  $("error").hidden = true;
  $("status").textContent = "Working …";
}

function request(plain) {
  const prompt = $("prompt").value;
  const body = $("form-of").value === "text" ? { text: prompt } : { messages: [{ role: "user", content: prompt }] };
  body.max_new_tokens = Number($("limit").value);
  if (engine === "reference") body.steps = Number($("steps").value);
  if (plain) body.plain = true;
  return body;
}

/* The reply of the speculative answer. */
async function speculate(signal) {
  let reply = null;
  for await (const line of linesOf(request(false), signal)) {
    if (line.kind === "error") throw new Error(line.error);
    if (line.kind === "start") run.live = line.live;
    if (line.kind === "pass") {
      // a server in a child process answers at the end: replayed at the speed that was measured
      if (!run.live) await new Promise((wake) => setTimeout(wake, 1000 * line.seconds));
      show(line);
    }
    if (line.kind === "reply") reply = line.reply;
  }
  if (reply.tokens.length !== run.tokens.length) $("output").textContent = reply.text;
  return reply;
}

async function compare(signal, speculative) {
  let plain = null;
  let reply = null;
  for await (const line of linesOf(request(true), signal)) {
    if (line.kind === "error") throw new Error(line.error);
    if (line.kind === "pass") plain = line.tokens_per_second;
    if (line.kind === "pass" && plain) $("plain-rate").textContent = `plain: ${plain.toFixed(1)}`;
    if (line.kind === "reply") reply = line.reply;
  }
  const { tokens, step_seconds: step } = reply;
  // typical times, which a hiccup of the machine does not move: tokens a pass over plain steps a pass
  const cost = speculative.step_seconds / step;
  if (step && cost) $("speedup").value = `${((speculative.tokens.length - 1) / speculative.passes.length / cost).toFixed(2)}×`;
  const at = tokens.findIndex((id, i) => id !== run.tokens[i]);
  const same = at < 0 && tokens.length === run.tokens.length;
  $("same").value = same ? "yes" : `differs at ${(at < 0 ? Math.min(tokens.length, run.tokens.length) : at) + 1}`;
}

async function start(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  reset();
  $("run").disabled = true;
  $("stop").disabled = false;
  document.body.classList.add("running");
  try {
    if (!$("server").children.length) await describe();
    const speculative = await speculate(running.signal);
    const told = `${run.tokens.length} tokens in ${run.passes} passes, acceptance length ${$("tau").value}`;
    if ($("compare").checked && engine === "reference") {
      $("status").textContent = `${told}. Now plainly …`;
      await compare(running.signal, speculative);
    }
    $("status").textContent = `Done: ${told}.`;
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("status").textContent = stopped ? "Stopped." : "";
    $("error").textContent = error.message;
    $("error").hidden = stopped;
  } finally {
    running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
    document.body.classList.remove("running");
  }
}

async function describe() {
  const response = await fetch(base + "info", { headers: authorised({}) });
  if (!response.ok) throw await failure(response);
  const info = await response.json();
  engine = info.engine;
  const name = (path) => path.replace(/\/+$/, "").split("/").pop();
  const rows = { target: name(info.target), drafter: name(info.drafter), engine: `${info.engine}, ${info.dtype} on ${info.device}` };
  const parts = Object.entries(rows).flatMap(([key, value]) => {
    const [dt, dd] = [document.createElement("dt"), document.createElement("dd")];
    dt.textContent = key;
    dd.textContent = value;
    return [dt, dd];
  });
  $("server").replaceChildren(...parts);
  $("server").title = `${info.target}\n${info.drafter}`;
  $("steps").disabled = $("compare").disabled = engine !== "reference";
}

$("form").addEventListener("submit", start);
$("stop").addEventListener("click", () => running && running.abort());
$("show-rejected").addEventListener("change", (event) => document.body.classList.toggle("no-rejected", !event.target.checked));
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
describe().catch((error) => {
  $("error").textContent = error.message;
  $("error").hidden = false;
});
