// The page: one moment of the run, and everything that shows it.

const POLL_MS = 1000;
const STEPS = 1000;

class View {
  constructor() {
    this.run = new Run();
    this.seq = 0;
    this.atEnd = true;
    this.axis = "time";
    this.partition = -1;
    this.metric = -1;
    this.chosen = -1;
    this.asked = false;
    this.timeline = new Timeline(this);
    this.histograms = new Histograms(this);
    this.evictions = new Evictions(this);
    this.groups = new Groups(this);
    this.group = new OneGroup(this);
    this.listen();
  }

  listen() {
    $("slider").addEventListener("input", () => this.slide());
    const step = { first: () => this.run.firstSeq, back: () => this.seq - 1, forth: () => this.seq + 1, last: () => this.run.lastSeq };
    for (const [id, where] of Object.entries(step)) $(id).addEventListener("click", () => this.goTo(where()));
    for (const axis of ["time", "version"]) {
      $(`by-${axis}`).addEventListener("click", () => {
        this.axis = axis;
        for (const each of ["time", "version"]) $(`by-${each}`).setAttribute("aria-pressed", String(each === axis));
        this.timeline.build();
        this.place();
        this.timeline.render();
      });
    }
    $("partition").addEventListener("change", (event) => { this.partition = Number(event.target.value); this.build(); });
    $("metric").addEventListener("change", (event) => { this.metric = Number(event.target.value); this.build(); });
  }

  // New data: the shape of the page follows it. The slider stays at its event, or at the end if it was there.
  push(chunk) {
    if (!chunk.header.after && this.run.meta) this.run = new Run();
    this.run.push(chunk);
    if (this.metric < 0 && this.run.meta.metrics.length) this.metric = Math.max(0, this.run.meta.metrics.indexOf("reward"));
    if (this.atEnd) this.seq = this.run.lastSeq;
    this.build();
  }

  build() {
    if (!this.run.meta) return;
    this.options();
    this.timeline.build();
    this.histograms.build();
    this.evictions.build();
    this.groups.build();
    showRun(this.run);
    this.place();
    this.draw();
  }

  options() {
    const { partitions, metrics } = this.run.meta;
    fill($("partition"), [["-1", "all"], ...partitions.map((name, at) => [String(at), name])], String(this.partition));
    document.querySelector(".only-partitions").hidden = partitions.length < 2;
    fill($("metric"), metrics.map((name, at) => [String(at), name]), String(this.metric));
    $("metric").hidden = metrics.length < 1;
  }

  // Moving in time

  slide() {
    const part = Number($("slider").value) / STEPS;
    if (part >= 1) return this.goTo(this.run.lastSeq, false);
    const end = this.axis === "time" ? this.run.length : this.timeline.turns;
    this.goTo(this.timeline.seq(part * end), false);
  }

  goTo(seq, place = true) {
    this.seq = Math.min(Math.max(seq, this.run.firstSeq), this.run.lastSeq);
    this.atEnd = this.seq >= this.run.lastSeq;
    if (place) this.place();
    this.render();
  }

  // The slider where the event is.
  place() {
    const end = this.axis === "time" ? this.run.length : this.timeline.turns;
    const part = this.atEnd ? 1 : end > 0 ? this.timeline.x(this.seq) / end : 0;
    $("slider").value = String(Math.min(STEPS, Math.round(part * STEPS)));
  }

  choose(group) {
    this.chosen = group;
    setText($("said"), `Group ${this.run.ids[group]}, ${this.run.meta.phases[this.run.phaseAt(group, this.seq)] ?? "not submitted yet"}.`);
    this.render();
  }

  // At most one drawing a frame, however fast the slider moves.
  render() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  draw() {
    if (!this.run.meta) return;
    const begin = performance.now();
    this.sums = this.run.phasesAt(this.seq, this.partition);
    showMoment(this);
    showTiles(this);
    this.timeline.render();
    this.histograms.render();
    this.evictions.render();
    this.groups.render();
    this.group.render();
    this.drawnMs = performance.now() - begin;
    this.drawn = (this.drawn ?? 0) + 1;
  }

  recolour() {
    this.timeline.redraw();
    this.histograms.redraw();
    this.group.draw();
  }
}

function fill(select, options, value) {
  const key = JSON.stringify(options);
  if (select.dataset.key !== key) {
    select.dataset.key = key;
    select.replaceChildren(...options.map(([id, name]) => el("option", { value: id }, name || "(unnamed)")));
  }
  select.value = value;
}

// The parts that are words -------------------------------------------------------------------------------

function showMoment(view) {
  const { run, seq } = view;
  const lineage = run.meta.lineage > 1 ? `, lineage ${run.tables.versions.of("lineage")[Math.max(0, run.versionRow(seq))]}` : "";
  const parts = [
    ["moment-clock", clock(run.timeOf(seq), run.length < 60)],
    ["moment-words", `event ${count(seq)} of ${count(run.lastSeq)}`],
    ["moment-words", `weight version ${run.versionAt(seq)}${lineage}`],
    ["moment-words wide", run.lastSeq ? moment(run.meta.origin_ms + run.timeOf(seq) * 1000) : ""],
  ];
  const output = $("moment");
  if (!output.children.length) output.append(...parts.map(([name]) => el("span", { class: name })));
  parts.forEach(([, text], at) => setText(output.children[at], text));
  $("slider").setAttribute("aria-valuetext", `${parts[0][1]}, ${parts[1][1]}, ${parts[2][1]}`);
  $("first").disabled = $("back").disabled = seq <= run.firstSeq;
  $("last").disabled = $("forth").disabled = seq >= run.lastSeq;
}

function showTiles(view) {
  const { run, seq, sums, partition } = view;
  const waited = run.waited(seq, partition), passed = run.timeOf(seq);
  const tiles = [
    ["Submitted", count(added(sums)), "groups"],
    ["In flight", count(sums[PENDING] + sums[RUNNING]), "pending or running"],
    ["Waiting", count(sums[FINISHED] + sums[FAILURE]), "ended, not sampled"],
    ...committedTiles(view),
    ["Tokens", brief(run.tokensAt(seq)), "of answers"],
    ["Trainer waited", span(waited) || "0 s", passed > 0 ? `${percent(waited, passed)} of the time` : "for batches"],
  ];
  const place = $("tiles");
  if (place.children.length !== tiles.length) {
    place.replaceChildren(...tiles.map(([title]) =>
      el("div", { class: "tile" }, el("h3", {}, title), el("p", { class: "figure" }), el("p", { class: "muted" }))));
    place.classList.toggle("more", tiles.length > 7);
  }
  tiles.forEach(([title, figure, words], at) => {
    setText(place.children[at].children[0], title);
    setText(place.children[at].children[1], figure);
    setText(place.children[at].children[2], words);
  });
}

const added = (sums) => sums.reduce((sum, value) => sum + value, 0);

// Only training groups are trained on or thrown away; groups of validation end as that.
function committedTiles({ run, seq, sums, partition }) {
  const train = run.meta.partitions.indexOf("train");
  const none = new Array(PHASES).fill(0), training = train < 0 ? none : run.phasesAt(seq, train);
  const all = added(training), share = run.meta.partitions.length > 1 ? "of training" : "of submitted";
  const trained = [
    ["Trained on", count(training[COMMITTED]), all ? `${percent(training[COMMITTED], all)} ${share}` : "committed"],
    ["Evicted", count(training[EVICTED]), all ? `${percent(training[EVICTED], all)} ${share}` : "thrown away"],
  ];
  const validated = sums[COMMITTED] - (partition < 0 ? training[COMMITTED] : 0);
  const ended = [["Validation", count(validated), "groups that ended"]];
  if (partition >= 0) return partition === train ? trained : ended;
  return added(sums) > all ? [...trained, ...ended] : trained;
}

function showRun(run) {
  const { meta } = run, name = meta.name || meta.run_id || "a run";
  document.title = `${name}: groupstate`;
  setText($("name"), name);
  $("name").title = meta.run_id;
  $("facts").replaceChildren(...[
    ["began", moment(meta.origin_ms)],
    ["lasted", span(run.length)],
    ["events", count(meta.last_seq)],
    ["opened", meta.openings > 1 ? counted(meta.openings, "time") : ""],
  ].filter(([, text]) => text && meta.last_seq).map(([title, text]) => el("li", {}, el("span", { class: "muted" }, `${title} `), text)));
  showState(meta);
  $("notices").replaceChildren(...meta.notices.map((notice) =>
    el("p", { class: `notice ${notice.kind === "damaged" ? "wrong" : ""}`, role: notice.kind === "damaged" ? "alert" : "note" },
      el("b", {}, { damaged: "The log is damaged. ", gone: "The beginning is gone. ", empty: "Nothing yet. ", left_out: "Not all is shown. " }[notice.kind] ?? ""),
      notice.kind === "damaged" && meta.last_seq ? `What comes before the damage is on this page, up to event ${count(meta.last_seq)}. ` : "",
      notice.text)));
  showVerdict(meta);
  pairs($("rules"), Object.entries(meta.rules).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]), "All rules are the defaults.");
  pairs($("totals"), Object.entries(meta.totals).filter(([, value]) => value).map(([key, value]) => [key, count(value)]), "Nothing was counted.");
  setText($("foot"), `Made by groupstate ${meta.made_by}${LIVE ? "" : `, ${moment(meta.made_ms)}`}${meta.library ? `, of a run by groupstate ${meta.library}` : ""}. Charts by uPlot (MIT). Times are those of the run's clock.`);
  const words = $("phase-words");
  if (!words.children.length) {
    words.append(...meta.phases.map((phase, at) => el("div", {}, el("dt", {}, badge(at, phase)), el("dd", {}, PHASE_WORDS[phase] ?? ""))));
  }
}

function showState(meta) {
  const node = $("state");
  const state = meta.closed ? ["closed", "ended"] : meta.last_seq ? ["open", "open"] : ["empty", "no event yet"];
  if (LIVE && live.lost) state.splice(0, 2, "lost", live.lost);
  else if (LIVE && !meta.closed) state.splice(0, 2, "live", "live");
  node.className = `chip ${state[0]}`;
  setText(node, state[1]);
  const quiet = ((LIVE ? Date.now() : meta.made_ms) - meta.last_ms) / 1000;
  node.title = meta.closed
    ? "The run was closed."
    : `The run was not closed: it goes on, or its process is gone. Its last event was written ${span(quiet) || "0 s"} before ${LIVE ? "now" : "this page was made"}.`;
}

function showVerdict(meta) {
  const { verdict } = meta, chip = $("verdict-chip");
  const words = { well: "\u2713 log is sound", wrong: `\u2717 ${counted(verdict.found.length, "breach", "breaches")}`, checking: "checking\u2026", open: "not checked" }[verdict.state];
  chip.className = `chip ${verdict.state}`;
  setText(chip, words);
  chip.title = verdict.text;
  const text = $("verdict-text");
  text.className = `verdict ${verdict.state}`;
  text.replaceChildren(el("b", {}, { well: "\u2713 Yes. ", wrong: "\u2717 No. ", checking: "", open: "" }[verdict.state]), verdict.text);
  $("violations").replaceChildren(...verdict.found.map(([invariant, seq, group, sentence]) =>
    el("div", { class: "violation" },
      el("button", { type: "button", class: "seq", title: "Move the slider there", onclick: () => page.goTo(seq) }, `event ${seq}`),
      el("span", {}, `${sentence} `, el("span", { class: "muted" }, `(invariant ${invariant}: ${meta.invariants[invariant] ?? ""})`)))));
  const list = $("invariants");
  if (!list.children.length) {
    list.append(...Object.entries(meta.invariants).map(([at, sentence]) => el("li", { value: Number(at) }, sentence)));
  }
}

function pairs(place, entries, none) {
  place.replaceChildren(...(entries.length ? entries.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))) : [el("p", { class: "muted" }, none)]));
}

// Colours ------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").dataset.now = theme;
  setText($("theme"), { auto: "\u25d0 Auto", light: "\u2600\uFE0E Light", dark: "\u263e\uFE0E Dark" }[theme]);
  page?.recolour();
}

function themeKept() {
  try { return localStorage.getItem("groupstate-theme"); } catch { return null; }
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf($("theme").dataset.now) + 1) % THEMES.length];
  try { localStorage.setItem("groupstate-theme", theme); } catch { /* a page from a file may keep nothing */ }
  setTheme(theme);
}

// Where the data comes from ------------------------------------------------------------------------------

const LIVE = document.body.dataset.live === "yes";
const live = { lost: "" };
let page = null;

// Ask the server for what came since, again and again.
async function follow() {
  try {
    const { last_seq: after = 0, state = -1 } = page.run.meta ?? {};
    const answer = await fetch(`data?after=${after}&state=${state}`, { cache: "no-store" });
    if (!answer.ok && answer.status !== 204) throw new Error(`the server answered ${answer.status}`);
    const was = live.lost;
    live.lost = "";
    if (answer.status === 200) page.push(await unpacked(new Uint8Array(await answer.arrayBuffer())));
    else if (was || page.run.meta.last_seq) showState(page.run.meta);
    document.body.dataset.ready = "yes";
  } catch (error) {
    live.lost = "server gone";
    if (page.run.meta) showState(page.run.meta);
    else fail(error);
  }
  setTimeout(follow, POLL_MS);
}

function fail(error) {
  $("notices").replaceChildren(el("p", { class: "notice wrong", role: "alert" },
    el("b", {}, "This page can't be shown. "), String(error?.message ?? error)));
}

async function begin() {
  setTheme(themeKept() ?? "auto");
  $("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.recolour());
  if (typeof DecompressionStream === "undefined") {
    fail("It needs a browser of 2023 or later (DecompressionStream).");
    return;
  }
  page = new View();
  document.groupstate = page; // for tests, and for whoever wants to look
  if (LIVE) return follow();
  const place = $("data");
  const data = await unpacked(bytesOfText(place.textContent.trim()));
  place.textContent = "";
  page.push(data);
  document.body.dataset.ready = "yes";
}

begin().catch(fail);
