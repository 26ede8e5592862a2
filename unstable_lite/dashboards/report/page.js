"use strict";
// Draws the curves and shows the games. Every text from the data becomes a text node: nothing here makes HTML of a string.

const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, of] of Object.entries(value)) made.style.setProperty(key, of);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

async function unpacked(name) {
  const bytes = Uint8Array.from(atob($(`blob-${name}`).textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// ---------------------------------------------------------------- colours

/** A role's colour as the browser resolves it now: plotly knows no CSS variables. */
function colour(role, alpha = 1) {
  const probe = el("span", { vars: { color: `var(--${role})` } });
  document.body.append(probe);
  const [r, g, b] = getComputedStyle(probe).color.match(/\d+/g);
  probe.remove();
  return `rgba(${r},${g},${b},${alpha})`;
}

const roleOf = (number) => `run-${number % 6}`;

/** Name for display, as league.py's name_of. */
const nameOf = (uid) => uid.replace(/^fixed-(?!base$)/, "");

// ---------------------------------------------------------------- curves

/** Most charts of a group that are drawn before anybody scrolls to them: some 300 take half a minute. */
const MANY = 40;

/** Marks of series, which colours alone must not tell apart: plotly's name, and the same as a character. */
const MARKS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"], ["cross", "✚"], ["x", "✖"]];
const markOf = (number) => MARKS[number % 6];

class Curves {
  constructor(data) {
    this.data = data;
    this.cards = [];
    this.isPrinting = false;
    addEventListener("beforeprint", () => this.print());
    addEventListener("scroll", () => this.drawLater(), { passive: true });
    addEventListener("afterprint", () => this.printed());
  }

  get byGroup() {
    return $("overlay")?.value === "mean";
  }

  /** Lines of one chart, each with a label and the number of its colour and mark; faint ones stand behind. */
  lines({ name }) {
    const isMean = ({ run }) => run === undefined, named = ([step, hours, y, low, high, text]) => ({ step, hours, y, low, high, text });
    const all = this.data.curves[name].map((line) => ({ ...line, points: line.points.map(named) }));
    if (!this.byGroup) return all.filter((line) => !isMean(line)).map((line) => ({ ...line, role: line.run }));
    return all.map((line) => ({ ...line, role: line.group, faint: !isMean(line) && all.some((mean) => isMean(mean) && mean.group === line.group) }));
  }

  /** chart: name of its curve, title, explain, reference, and whether it is wide, with a legend of its own. */
  add(parent, chart) {
    const last = this.lines(chart).filter((line) => !line.faint), newest = last.length === 1 && last[0].points.at(-1);
    const told = last.map(({ label, points }) => points.length && `${label}: from ${points[0].text} to ${points.at(-1).text}`);
    const plot = el("div", { class: "plot", role: "img", "aria-label": `${chart.title}. ${told.filter(Boolean).join("; ")}` });
    const values = el("div", { class: "values", tabindex: "0" });
    const details = el("details", { ontoggle: () => details.open && this.tabulate(card, values) }, el("summary", {}, "Values", chart.name !== chart.title && el("code", { class: "tag-name" }, chart.name)), values);
    const latest = el("span", { class: "latest" }, newest && emphasised(newest.text));
    parent.append(el("figure", { class: chart.wide ? "chart wide" : "chart" },
      el("figcaption", {}, el("span", {}, chart.title), latest, chart.explain && el("span", { class: "explain" }, chart.explain)), plot, details));
    const card = { ...chart, plot, share: this.data.metrics[chart.name] };
    this.cards.push(card);
    this.drawLater();
  }

  redraw() {
    for (const card of this.cards) card.isDrawn = false;
    this.drawLater();
  }

  /** Cards that are not drawn yet, first those in view. In a closed group they have no size to be drawn in. */
  waiting() {
    const outside = ({ plot }, screens = 0) => plot.getBoundingClientRect().bottom < -screens * innerHeight || plot.getBoundingClientRect().top > (1 + screens) * innerHeight;
    const isNeeded = (card) => this.isPrinting || card.plot.closest(".charts").children.length <= MANY || !outside(card, 1);
    const waiting = this.cards.filter((card) => !card.isDrawn && !card.plot.closest(".chart-group:not([open])") && isNeeded(card));
    return waiting.sort((a, b) => outside(a) - outside(b));
  }

  /** Draws what waits one by one, when the browser is idle: a printed page or a screenshot shows charts that nobody scrolled to. */
  async drawLater() {
    delete document.documentElement.dataset.drawn;
    if (this.isAwaited) return;
    this.isAwaited = true;
    await whenIdle();
    for (let [card] = this.waiting(); card && !this.isPrinting; [card] = this.waiting()) {
      await this.plot(await plotlyLoaded(), card);
      await whenIdle();
    }
    this.isAwaited = false;
    document.documentElement.dataset.drawn = "true";
  }

  /** Draws every chart at once, in light colours and able to shrink: the paper is white and narrower than the window. */
  print() {
    if (!window.Plotly) return;
    this.isPrinting = true;
    document.documentElement.style.colorScheme = "light";
    for (const card of this.cards) card.isDrawn = false;
    for (const card of this.waiting()) {
      this.plot(window.Plotly, card);
      for (const drawing of card.plot.querySelectorAll("svg.main-svg")) drawing.setAttribute("viewBox", `0 0 ${drawing.getAttribute("width")} ${drawing.getAttribute("height")}`);
    }
  }

  printed() {
    this.isPrinting = false;
    for (const drawing of document.querySelectorAll(".plot svg.main-svg")) drawing.removeAttribute("viewBox");
    document.documentElement.style.colorScheme = "";
    this.redraw();
  }

  plot(plotly, card) {
    card.isDrawn = true;
    const axis = $("x-axis").value === "steps" ? "step" : "hours", ink = colour("ink"), soft = colour("soft"), line = colour("line");
    const lines = this.lines(card).map((one) => ({ ...one, points: one.points.filter((point) => point[axis] !== null) }));
    const range = card.share ? [-0.02, 1.02] : unlessFlat(lines), traces = [];
    for (const { label, role, points, faint } of lines) {
      const own = colour(roleOf(role), faint ? 0.7 : 1), banded = faint ? [] : points.filter((point) => point.low !== null);
      const x = points.map((point) => point[axis]);
      if (banded.length > 1) {
        const bx = banded.map((point) => point[axis]);
        traces.push({ x: [...bx, ...bx.toReversed()], y: [...banded.map((p) => p.high), ...banded.toReversed().map((p) => p.low)],
          fill: "toself", fillcolor: colour(roleOf(role), 0.16), line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false });
      }
      traces.push({ x, y: points.map((point) => point.y), mode: (points.length < 12 || lines.length > 1) && !faint ? "lines+markers" : "lines", name: plain(label),
        line: { color: own, width: faint ? 1 : 2, dash: card.wide && role ? "dot" : undefined }, marker: { size: 7, color: own, symbol: markOf(role)[0], maxdisplayed: 12 },
        text: points.map(({ text }) => `${plain(label)}: <b>${plain(text).replace(" (", "</b> (")}`),
        hovertemplate: "%{text}<extra></extra>", hoverinfo: faint ? "skip" : undefined, showlegend: Boolean(card.wide) });
    }
    const font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: soft };
    const layout = { margin: { l: 44, r: 10, t: 8, b: 34 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font,
      hovermode: "x unified", hoverlabel: { bgcolor: colour("card"), bordercolor: line, font: { ...font, color: ink } },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      shapes: card.reference === undefined ? [] : [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: card.reference, y1: card.reference, line: { color: soft, width: 1.5, dash: "dash" } }],
      xaxis: { title: { text: axis === "step" ? "update" : "hours", standoff: 4, font }, gridcolor: "rgba(0,0,0,0)", linecolor: line, zeroline: false, nticks: 6 },
      yaxis: { gridcolor: line, zeroline: false, automargin: true, range, ...(card.share ? { tickvals: [0, 0.25, 0.5, 0.75, 1], tickformat: ".0%" } : { nticks: 5 }) },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font }, showlegend: Boolean(card.wide) };
    return plotly.react(card.plot, traces, layout, { displayModeBar: false, responsive: true, doubleClick: "reset" });
  }

  tabulate(card, into) {
    const rows = this.lines(card).flatMap(({ label, points }) => points.map((point) => el("tr", {}, el("td", {}, label),
      el("td", { class: "num" }, String(point.step)), el("td", {}, ...emphasised(point.text)))));
    const head = ["", "update", "value (interval, n)"].map((name) => el("th", { scope: "col" }, name));
    into.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
  }
}

/** A range around values that hardly differ, which would else look like a storm. */
function unlessFlat(lines) {
  const values = lines.flatMap(({ points }) => points.map((point) => point.y));
  const [low, high] = [Math.min(...values), Math.max(...values)], size = Math.max(Math.abs(low), Math.abs(high));
  return high - low < 0.02 * size ? [low - 0.05 * size, high + 0.05 * size] : undefined;
}

const whenIdle = () => new Promise((next) => (window.requestIdleCallback ?? setTimeout)(next, window.requestIdleCallback ? { timeout: 1000 } : 20));

let plotlyLoading;
const plotlyLoaded = () => (plotlyLoading ??= unpacked("plotly").then((source) => {
  document.head.append(el("script", {}, source));
  return window.Plotly;
}));

/** For plotly, which reads a little HTML in its texts. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

/** A text whose value stands before its interval and sample size. */
function emphasised(text) {
  const [value, ...rest] = text.split(" (");
  return [el("b", {}, value), rest.length ? ` (${rest.join(" (")}` : ""];
}

/** Three significant digits, and all digits of whole numbers. */
const figures = new Intl.NumberFormat("en", { maximumFractionDigits: 0, maximumSignificantDigits: 3, roundingPriority: "morePrecision" });

function drawCurves(data) {
  const curves = new Curves(data);
  data.sections.forEach(({ title, charts }, i) => {
    const grid = el("div", { class: "charts" }), open = i < 2;
    const fill = () => {
      for (const chart of grid.children.length ? [] : charts) curves.add(grid, chart);
      curves.drawLater();
    };
    if (!charts.length) grid.append(el("p", { class: "note" }, "Nothing yet: the first values come with the first update and the first evaluation."));
    $("charts").append(el("details", { class: "chart-group", open, ontoggle: fill }, el("summary", {}, title), grid));
    if (open) fill();
  });
  for (const chart of data.ladders) curves.add($("ladder-chart"), chart);

  const legend = () => {
    const named = curves.byGroup ? data.groups : data.runs.map(({ label }) => label);
    $("legend").replaceChildren(...(named.length > 1 ? named : []).map((label, i) => el("span", {}, el("span", { class: "mark", vars: { color: `var(--${roleOf(i)})` } }, `${markOf(i)[1]} `), label)));
    $("bands").textContent = curves.byGroup
      ? "Bold: the mean over seeds, with its 95 % t-interval. Faint: each seed."
      : "Bands of shares are 95 % intervals, given n. Curves of training games are means over the newest 512, so neighbouring points share games.";
  };
  for (const id of ["x-axis", "overlay"]) $(id)?.addEventListener("change", () => { legend(); curves.redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => curves.redraw());
  legend();
}

// ---------------------------------------------------------------- games

const PAGE = 50, LONG = 20000;
const MODES = { off: "no colours", logprob: "log-probability", weight: "importance weight" };
const ENDS = { natural: "", invalid: "invalid move", truncated: "cut off", void: "void" };
const OUTCOMES = { win: "won", draw: "drawn", loss: "lost", na: "single player", mirror: "itself" };
// Controls, marks of writing direction, separators of lines: what could hide or reorder text is shown by name.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function shown(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    const code = match[0].charCodeAt(0), name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    nodes.push(el("span", { class: "ctl", title: name }, code < 32 ? String.fromCharCode(0x2400 + code) : name));
    from = match.index + 1;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

function textBox(text, className = "text", marked = "") {
  const box = el("pre", { class: className, tabindex: "0" });
  const fill = (part) => {
    const at = marked ? part.lastIndexOf(marked) : -1;
    box.replaceChildren(...(at < 0 ? shown(part)
      : [...shown(part.slice(0, at)), el("mark", {}, ...shown(marked)), ...shown(part.slice(at + marked.length))]));
  };
  fill(text.slice(0, LONG));
  const more = el("button", { type: "button", onclick: () => { fill(text); more.remove(); } }, `Show all ${text.length.toLocaleString("en")} characters`);
  return el("div", {}, box, text.length > LONG && more);
}

class Browser {
  constructor(data) {
    this.data = data;
    this.games = data.games.map((row, key) => this.entry(row, key)).sort((a, b) => a.run - b.run || b.game_idx - a.game_idx);
    this.found = this.games;
    this.current = null;
    this.turn = 0;
    this.mode = "off";
    this.form = $("filters");
    this.fillSelects();
    this.form.addEventListener("input", () => this.filter());
    $("list").addEventListener("scroll", () => this.grow());
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("hashchange", () => this.follow());
    $("browser").hidden = false;
    this.filter();
    if (!this.follow() && this.games.length) this.open(this.first(), 0, false, false);
    else if (!this.games.length) $("game").append(el("p", { class: "note" }, "There are no games to show: no game has ended yet, or the run keeps none."));
  }

  /** The newest lost evaluation game of the newest policy that lost one; without any, the newest game. */
  first() {
    const updates = (game) => Number(/\d+$/.exec(game.checkpoint)?.[0] ?? 0);
    const lost = this.games.filter((game) => game.kind === "eval" && game.outcome === "loss");
    return lost.reduce((best, game) => (updates(game) > updates(best) ? game : best), lost[0] ?? this.games[0]);
  }

  /** Returns the game with the fields that the list shows, and its values for each filter. */
  entry(game, key) {
    const { end, players, policy } = game;
    const own = players.filter((player) => policy.includes(player.pid)), others = players.filter((player) => !policy.includes(player.pid));
    const outcome = end === "void" ? "" : players.length > 1 && others.length === 0 ? "mirror" : own[0]?.outcome ?? "", checkpoint = own[0]?.model ?? "";
    const opponents = players.length === 1 ? ["nobody"] : others.length ? [...new Set(others.map((player) => player.model))] : ["itself"];
    const facets = { run: [String(game.run)], env: [game.env_id], kind: [game.kind], checkpoint: [checkpoint], opponent: opponents, outcome: [outcome],
      end: [end, ...game.invalid_pids.map((pid) => (policy.includes(pid) ? "own" : "other"))] };
    return { ...game, key, outcome, checkpoint, opponents, facets };
  }

  fillSelects() {
    const byAge = new Intl.Collator("en", { numeric: true }).compare, names = { run: (i) => this.data.runs[i].label, opponent: nameOf };
    for (const select of this.form.querySelectorAll("select:empty")) {
      const values = [...new Set(this.games.flatMap((game) => game.facets[select.name]))].sort(byAge), told = names[select.name] ?? String;
      select.append(el("option", { value: "" }, "all"), ...values.map((value) => el("option", { value }, told(value))));
    }
  }

  filter() {
    const { number, ...wanted } = Object.fromEntries(new FormData(this.form)), digits = number.replace(/[#\s]/g, "");
    this.found = this.games.filter((game) => String(game.game_idx).startsWith(digits)
      && Object.entries(wanted).every(([name, value]) => !value || game.facets[name].includes(value)));
    this.numShown = PAGE;
    this.list();
    this.reveal();
  }

  list() {
    const focused = document.activeElement?.dataset?.key, rows = this.found.slice(0, this.numShown).map((game) => this.row(game));
    $("count").textContent = `${this.found.length.toLocaleString("en")} of ${this.games.length.toLocaleString("en")} games, newest first`;
    $("list").replaceChildren(...(rows.length ? rows : [this.none()]));
    $("list").querySelector(`[data-key="${focused}"]`)?.focus({ preventScroll: true });
  }

  /** Adds rows once the list is scrolled to its last ones. */
  grow() {
    const { scrollTop, clientHeight, scrollHeight } = $("list");
    if (scrollTop + 2 * clientHeight < scrollHeight || this.numShown >= this.found.length) return;
    $("list").append(...this.found.slice(this.numShown, this.numShown + PAGE).map((game) => this.row(game)));
    this.numShown += PAGE;
  }

  row(game) {
    const how = game.end === "natural" ? tag(game.outcome, OUTCOMES[game.outcome]) : tag(game.end, game.reason ? `${ENDS[game.end]}: ${game.reason}` : ENDS[game.end]);
    const run = this.data.runs.length > 1 ? `${this.data.runs[game.run].label} · ` : "";
    const about = `${run}${game.checkpoint} – ${game.opponents.map(nameOf).join(", ")} · ${game.turns} turns · ${game.kind === "eval" ? "evaluation" : "training"}`;
    return el("li", {}, el("button", { type: "button", "data-key": game.key, "aria-current": game === this.current ? "true" : null, onclick: () => this.open(game, 0, true) },
      el("span", {}, ...shown(`#${game.game_idx} ${game.env_id}`)), how, el("small", {}, ...shown(about))));
  }

  /** Why the list is empty: the filters that are set. */
  none() {
    const set = [...this.form.elements].filter((field) => field.name && field.value);
    const told = set.map((field) => `${field.labels[0].firstChild.textContent.trim()} “${field.selectedOptions?.[0].textContent ?? field.value}”`);
    return el("li", { class: "note" }, el("p", {}, told.length ? `No kept game has ${told.join(" and ")}.` : "The run kept no games."),
      told.length ? el("button", { type: "button", onclick: () => { this.form.reset(); this.filter(); } }, "Show all games") : "");
  }

  /** Scrolls the list, not the page, to the chosen game. */
  reveal() {
    const list = $("list"), row = list.querySelector("[aria-current]");
    const isSeen = row && row.offsetTop >= list.scrollTop && row.offsetTop + row.offsetHeight <= list.scrollTop + list.clientHeight;
    if (!isSeen) list.scrollTop = row ? row.offsetTop - list.clientHeight / 3 : 0;
  }

  async open(game, turn = 0, focus = false, isNamed = true) {
    this.current = game;
    this.turn = turn;
    $("browser").classList.add("open");
    this.numShown = Math.max(this.numShown, this.found.indexOf(game) + PAGE);
    this.list();
    this.reveal();
    if (this.part !== game.part) [this.wholes, this.part] = [JSON.parse(await unpacked(`games-${game.part}`)), game.part];
    if (this.current !== game) return;
    const whole = this.wholes[game.place];
    this.whole = whole;
    this.turn = Math.max(0, Math.min(turn, whole.turns.length - 1));
    this.show(isNamed);
    if (focus) $("game").focus({ preventScroll: true });
    if (focus && ($("game").getBoundingClientRect().top < 0 || matchMedia("(max-width: 56rem)").matches)) $("game").scrollIntoView();
  }

  goTo(turn) {
    if (!this.whole?.turns[turn]) return;
    this.turn = turn;
    this.show();
  }

  neighbour(by) {
    const next = this.found[this.found.indexOf(this.current) + by];
    if (next) this.open(next);
  }

  close() {
    $("browser").classList.remove("open");
    this.reveal();
    ($("list").querySelector("[aria-current]") ?? this.form.elements.number).focus();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return this.close();
    if (event.target.closest("input, select") || !this.current) return;
    const modes = Object.keys(MODES), keys = { ArrowRight: () => this.goTo(this.turn + 1), j: () => this.goTo(this.turn + 1), ArrowLeft: () => this.goTo(this.turn - 1), k: () => this.goTo(this.turn - 1),
      n: () => this.neighbour(1), p: () => this.neighbour(-1), c: () => this.recolour(modes[(modes.indexOf(this.mode) + 1) % 3]) };
    if (!keys[event.key] || (event.key.startsWith("Arrow") && event.target.closest(".scroll, pre, .plot"))) return;
    event.preventDefault();
    keys[event.key]();
  }

  recolour(mode) {
    this.mode = mode;
    this.show();
  }

  /** Opens what the address names, as in #game=0.123.4: run, game number, turn. */
  follow() {
    const match = location.hash.match(/^#game=(\d+)\.(\d+)\.(\d+)$/);
    const game = match && this.games.find((one) => one.run === Number(match[1]) && one.game_idx === Number(match[2]));
    if (game && !(game === this.current && this.turn === Number(match[3]) - 1)) this.open(game, Number(match[3]) - 1, true);
    return Boolean(game);
  }

  /** isNamed: whether the address names the game, which it does once somebody has chosen one. */
  show(isNamed = true) {
    const game = this.current, { turns } = this.whole, focused = document.activeElement?.dataset?.act;
    if (isNamed) history.replaceState(null, "", `#game=${game.run}.${game.game_idx}.${this.turn + 1}`);
    const seat = (pid) => ({ "--seat": `var(--${roleOf(pid)})` });
    const act = (name, label, does, disabled) => el("button", { type: "button", "data-act": name, "aria-label": `${name.startsWith("game") ? "Game" : "Turn"}: ${/on$|next/.test(name) ? "next" : "previous"}`, onclick: does, disabled }, label);
    const place = this.found.indexOf(game);
    const parts = [
      el("button", { type: "button", class: "back", onclick: () => this.close() }, "‹ All games"),
      el("h3", {}, ...shown(`Game ${game.game_idx}: ${game.env_id}`)),
      el("p", { class: "note" }, ...shown([this.data.runs.length > 1 && this.data.runs[game.run].label, game.kind === "eval" ? `evaluation${game.eval_label ? ` (${game.eval_label})` : ""}` : "training game",
        `env seed ${this.whole.seed}`, `${turns.length} turns`, `${this.whole.seconds.toFixed(1)} s`].filter(Boolean).join(" · "))),
      el("ul", { class: "seats", "aria-label": "Players" }, game.players.map((player) => el("li", {}, el("span", { class: "pid", vars: seat(player.pid) }, String(player.pid)),
        el("b", {}, ...shown(nameOf(player.model))), game.policy.includes(player.pid) && game.kind === "train" && el("span", { class: "tag" }, "trained on"),
        player.outcome && player.outcome !== "na" && tag(player.outcome, OUTCOMES[player.outcome]), game.invalid_pids.includes(player.pid) && tag("invalid", "invalid move"),
        player.reward !== null && player.reward !== undefined && el("span", { class: "note" }, `reward ${signed(player.reward)}`)))),
      game.end === "truncated" && !game.reason && el("p", { class: "note" }, "Cut off by the cap on turns."),
      this.whole.error && el("div", {}, el("h4", {}, game.end === "void" ? "Void, because" : "Ended, because"), textBox(this.whole.error)),
    ];
    if (turns.length) {
      parts.push(
        el("div", { class: "turns", role: "group", "aria-label": "Turns" }, turns.map((one, i) => el("button", { type: "button", vars: seat(one.pid), class: this.isInvalid(i) || !one.format_ok ? "bad" : null, "data-act": `turn-${i}`,
          "aria-current": i === this.turn ? "true" : null, "aria-label": `Turn ${i + 1}, player ${one.pid}`, onclick: () => this.goTo(i) }, `${i + 1}${this.isInvalid(i) || !one.format_ok ? "!" : ""}`))),
        el("div", { class: "turnbar" }, act("previous", "‹", () => this.goTo(this.turn - 1), this.turn === 0), act("next", "›", () => this.goTo(this.turn + 1), this.turn === turns.length - 1),
          el("span", { role: "status" }, `Turn ${this.turn + 1} of ${turns.length} `, el("span", { class: "word" }, "by player "), el("span", { class: "pid", vars: seat(turns[this.turn].pid) }, String(turns[this.turn].pid))),
          el("span", { class: "grow" }), act("game-back", ["«", el("span", { class: "word" }, " game")], () => this.neighbour(-1), place <= 0), act("game-on", [el("span", { class: "word" }, "game "), "»"], () => this.neighbour(1), place < 0 || place === this.found.length - 1)),
        this.turnView(turns[this.turn]));
    }
    $("game").replaceChildren(...parts.filter(Boolean));
    if (focused) $("game").querySelector(`[data-act="${focused}"]`)?.focus({ preventScroll: true });
  }

  /** Whether this turn is the one that broke the rules: the last of a player who ended the game so. */
  isInvalid(i) {
    const { turns } = this.whole, { pid } = turns[i];
    return this.current.invalid_pids.includes(pid) && turns.findLastIndex((turn) => turn.pid === pid) === i;
  }

  turnView(turn) {
    const player = this.current.players.find((one) => one.pid === turn.pid);
    const select = el("select", { "data-act": "mode", onchange: (event) => this.recolour(event.target.value) },
      Object.entries(MODES).map(([mode, name]) => el("option", { value: mode, selected: mode === this.mode }, name)));
    const [thought, answer] = parted(turn);
    const hasTokens = this.whole.turns.some((one) => one.tokens);
    const said = this.mode === "off" || !hasTokens ? [
      thought && el("div", {}, el("h4", {}, "Reasoning"), textBox(thought, "text thought")),
      el("h4", {}, thought ? "Answer" : "What the player wrote"), textBox(answer, "text", turn.action),
    ] : [el("h4", {}, "What was sampled, token by token"), this.tokens(turn, player)];
    return el("div", {},
      el("h4", {}, `Observation of player ${turn.pid}`), this.observation(turn),
      turn.prompt && el("details", {}, el("summary", {}, `The whole prompt, as ${turn.trained ? "the model read it" : "its template makes it"}`), textBox(turn.prompt.join(turn.obs))),
      hasTokens && el("div", { class: "tokbar" }, el("label", {}, "colour tokens by ", select)),
      ...said,
      !hasTokens && player && !player.model.startsWith("fixed-") && el("p", { class: "note" }, "The run did not keep its tokens. With ", el("code", {}, "tracker.keep_tokens=true"), " they are kept and can be coloured by probability."),
      el("h4", {}, "Action"), el("div", { class: "action" }, ...shown(turn.action)),
      " ", this.isInvalid(this.turn) && tag("invalid", "invalid move"), !turn.format_ok && tag("invalid", "answer not where it should be"),
      el("span", { class: "note" }, ` ${turn.seconds.toFixed(2)} s${Number.isInteger(turn.adapter) ? ` · adapter ${turn.adapter}` : ""}`),
      this.turn < (this.whole.branch_turn ?? 0) && el("p", { class: "note" }, "This turn repeats an earlier game, from which this one branches off."),
      el("h4", {}, "Rewards"), this.rewards(turn, player));
  }

  /** What is new since the player's last turn stands open; the lines before it are folded away. */
  observation(turn) {
    const before = this.whole.turns.slice(0, this.turn).findLast((one) => one.pid === turn.pid);
    const lines = turn.obs.split("\n"), old = before ? before.obs.split("\n") : [];
    let same = 0;
    while (same < lines.length - 1 && same < old.length && lines[same] === old[same]) same++;
    if (same < 3) return textBox(turn.obs);
    return el("div", {}, el("details", { class: "same" }, el("summary", {}, `${same} lines as in the turn before`), textBox(lines.slice(0, same).join("\n"))), textBox(lines.slice(same).join("\n")));
  }

  rewards(turn, player) {
    const stages = [["at the end of the game", player?.reward]];
    if (turn.trained) {
      const [env, step, last] = turn.trained.rewards;
      stages.push(["after the final transforms", env], ["after the step's transforms", step], ["as trained on", last]);
    }
    const list = el("ol", { class: "rewards" }, stages.filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => el("li", {}, el("b", {}, signed(value)), el("span", {}, name))));
    const why = turn.trained ? `Trained on in update ${turn.trained.update}, ${turn.trained.staleness} updates after it was played.`
      : this.current.kind === "eval" ? "Evaluation games are not trained on."
      : this.current.policy.includes(turn.pid) ? "No batch that is on disk has this turn: it was dropped as too old, rejected (rewards.reject_zero_signal), or was still waiting." : "This player is not trained.";
    return el("div", {}, list, el("p", { class: "note" }, why));
  }

  tokens(turn, player) {
    if (!turn.tokens) {
      const why = player?.model.startsWith("fixed-") ? "This player is none of the run's own models: what it sampled is not known."
        : "The tokens of this turn were not kept.";
      return el("div", {}, el("p", { class: "note" }, why), textBox(turn.text));
    }
    const { pieces, logprobs, completion_ids: ids, finish_reason } = turn.tokens, learner = turn.trained?.learner_logprobs, byWeight = this.mode === "weight";
    const cap = this.data.runs[this.current.run].cap;
    const told = el("span", { role: "status" }, "Choose a token.");
    const scale = byWeight ? [el("span", {}, "½"), el("span", { class: "scale weight" }), el("span", {}, `2${cap ? `; underlined: cut to ${cap}` : ""}`)]
      : [el("span", {}, "certain"), el("span", { class: "scale logprob" }), el("span", {}, "1 in 150 or less")];
    const notes = [];
    if (byWeight && learner && learner.length < ids.length) notes.push(learner.length ? `Only the first ${learner.length} tokens were trained on: learner.max_train_len cut the rest.`
      : "This turn was not trained on: it is longer than learner.max_train_len.");
    if (byWeight && !learner) notes.push(turn.trained ? "The learner's log-probabilities of this turn were not recorded, so there are no importance weights to show."
      : "No batch that is on disk has this turn: only turns that were trained on have importance weights.");
    if (!pieces) notes.push("Tokens are shown by number: the run's tokenizer is not on the machine where this report was made.");
    let at = 0;
    const spans = (pieces ?? ids.map(() => [null, 1])).map(([text, count]) => {
      const from = at, to = from + count;
      at = to;
      const of = logprobs.slice(from, to), logprob = of.reduce((sum, one) => sum + one, 0);
      const weight = learner && to <= learner.length ? Math.exp(learner.slice(from, to).reduce((sum, one) => sum + one, 0) - logprob) : null;
      const strength = byWeight ? (weight === null ? 0 : Math.min(1, Math.abs(Math.log2(weight)))) : Math.min(1, -logprob / 5);
      const tint = byWeight && weight < 1 ? "var(--less)" : "var(--unlikely)";
      const say = () => {
        const name = count > 1 ? `Tokens ${from + 1} to ${to}, one character` : `Token ${from + 1}`;
        told.textContent = `${name}: number ${ids.slice(from, to).join(", ")}, log-probability ${of.map((one) => one.toFixed(3)).join(", ")} (p = ${figures.format(Math.exp(logprob))})${weight === null ? "" : `, importance weight ${weight.toFixed(3)}`}`;
        span.parentNode.querySelector(".chosen")?.classList.remove("chosen");
        span.classList.add("chosen");
      };
      const isStop = to === ids.length && finish_reason === "stop";
      const span = el("span", { class: `tok${isStop || text === null ? " special" : ""}${byWeight && cap && weight > cap ? " capped" : ""}`, onclick: say,
        title: `log-probability ${logprob.toFixed(3)}${weight === null ? "" : `, weight ${weight.toFixed(3)}`}`, vars: { "--tint": tint, "--strength": `${Math.round(50 * strength)}%` } },
        ...(text === null ? [`#${ids[from]}`] : shown(text)));
      return span;
    });
    const byKey = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = [...box.querySelectorAll(".tok")];
      const next = by && all[all.findIndex((one) => one.classList.contains("chosen")) + by];
      if (!next) return;
      event.preventDefault();
      next.click();
      next.scrollIntoView({ block: "nearest" });
    };
    const box = el("pre", { class: "text sampled", tabindex: "0", "aria-label": "Sampled tokens; the arrow keys go through them", onkeydown: byKey }, spans.slice(0, 4000));
    if (spans.length > 4000) box.append(el("button", { type: "button", onclick: (event) => event.target.replaceWith(...spans.slice(4000)) }, `Show all ${spans.length.toLocaleString("en")} tokens`));
    return el("div", {}, el("div", { class: "tokbar" }, ...scale, told), ...notes.map((note) => el("p", { class: "note" }, note)), box,
      el("p", { class: "note" }, `${ids.length} tokens of adapter version ${turn.tokens.adapter_version}; ${finish_reason === "stop" ? "ended by itself" : "cut at the longest length allowed"}.`));
  }
}

/** Reasoning, and the answer that follows it. */
function parted({ text, close }) {
  const end = close ? text.lastIndexOf(close) + close.length : 0;
  if (end) return [text.slice(0, end), text.slice(end)];
  const box = text.lastIndexOf("\\boxed{");
  return box > 0 ? [text.slice(0, box), text.slice(box)] : ["", text];
}

const signed = (value) => `${value > 0 ? "+" : ""}${figures.format(value)}`;
const tag = (kind, text) => el("span", { class: `tag ${kind}` }, text ?? "");

// ---------------------------------------------------------------- start

// A box with a table that goes on to the right is marked.
for (const box of document.querySelectorAll(".scroll")) {
  const mark = () => box.toggleAttribute("data-more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.addEventListener("scroll", mark);
  new ResizeObserver(mark).observe(box);
}

async function start() {
  $("copy")?.addEventListener("click", ({ currentTarget: button }) => navigator.clipboard.writeText(button.dataset.markdown).then(() => { button.textContent = "Copied"; }));
  if (!("DecompressionStream" in window)) {
    $("charts").append(el("p", { class: "note" }, "This browser is too old for the curves and the games; any of 2024 or later will do."));
    return;
  }
  const data = JSON.parse(await unpacked("data"));
  drawCurves(data);
  window.browser = new Browser(data);
  document.documentElement.dataset.ready = "true";
}

start();
