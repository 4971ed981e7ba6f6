// The table of groups: as many rows of it as can be seen.

const ROW = 34;

class Groups {
  constructor(view) {
    this.view = view;
    this.table = $("table");
    this.body = $("rows");
    this.spacer = el("div", { class: "spacer" });
    this.body.append(this.spacer);
    this.pool = [];
    this.order = new Uint32Array(0);
    this.count = 0;
    this.sort = "submitted";
    this.down = false;
    this.query = "";
    this.hits = null;
    this.phase = -1;
    this.into = {};
    this.body.addEventListener("scroll", () => this.paint());
    new ResizeObserver(() => this.paint()).observe(this.body);
    this.table.addEventListener("keydown", (event) => this.key(event));
    $("search").addEventListener("input", (event) => { this.find(event.target.value); });
    $("phase-filter").addEventListener("change", (event) => {
      this.phase = Number(event.target.value);
      this.view.render();
    });
  }

  // Which columns there are depends on what the run has.
  build() {
    const { run, metric } = this.view, meta = run.meta;
    const several = meta.partitions.length > 1, named = meta.datasets.length > 1;
    const columns = [
      ["group", "Group", "minmax(70px, 1.3fr)", "The group's id"],
      ["phase", "Phase", "102px", "Where it is at this moment"],
      ...(named ? [["dataset", "Dataset", "minmax(76px, .7fr)", "Where its prompt comes from"]] : []),
      ...(several ? [["partition", "Partition", "72px", "Training or validation"]] : []),
      ["version", "Version", "70px", "Weight version when it was submitted"],
      ["lag", "Lag", "46px", "Weight versions old when it was sampled or evicted"],
      ["sessions", "Sessions", "78px", "Finished of all; failed ones in brackets"],
      ["tokens", "Tokens", "62px", "Tokens of its answers"],
      ...(metric < 0 ? [] : [["metric", meta.metrics[metric], "72px", "Mean over its finished sessions"]]),
      ["submitted", "Submitted", "98px", "Time since the beginning"],
      ["took", "Took", "74px", "From submission to the end of its last session"],
      ["why", "Left by", "minmax(86px, 1fr)", "Why it was evicted, or the batch that took it"],
    ];
    const key = JSON.stringify(columns);
    if (key !== this.key_) {
      this.key_ = key;
      this.columns = columns;
      this.pool.forEach((row) => row.node.remove());
      this.pool = [];
      this.table.style.setProperty("--columns", columns.map(([, , width]) => width).join(" "));
      $("columns").replaceChildren(...columns.map(([id, title, , words]) =>
        el("div", { role: "columnheader", class: NUMERIC.has(id) ? "right" : "" },
          el("button", { type: "button", title: words, onclick: () => this.sortBy(id) }, title, el("span", { class: "arrow" })))));
      const chosen = $("phase-filter").value;
      $("phase-filter").replaceChildren(
        el("option", { value: "-1" }, "any"), ...meta.phases.map((name, at) => el("option", { value: String(at) }, name)));
      $("phase-filter").value = chosen || "-1";
    }
    this.arrows();
    if (this.query) this.find(this.query, false);
  }

  sortBy(id) {
    this.down = this.sort === id ? !this.down : FALLING.has(id);
    this.sort = id;
    this.arrows();
    this.body.scrollTop = 0;
    this.view.render();
    const way = this.down ? "falling" : "rising";
    setText($("said"), `Sorted by ${id}, ${way}.`);
  }

  arrows() {
    this.columns.forEach(([id], at) => {
      const node = $("columns").children[at], sorted = id === this.sort;
      node.setAttribute("aria-sort", sorted ? (this.down ? "descending" : "ascending") : "none");
      setText(node.querySelector(".arrow"), sorted ? (this.down ? "\u25bc" : "\u25b2") : "");
    });
  }

  find(text, render = true) {
    this.query = text;
    const words = [...text.toLowerCase().matchAll(/"([^"]+)"|\S+/g)].map(([word, quoted]) => quoted ?? word);
    if (!words.length) {
      this.hits = null;
    } else {
      const hay = this.view.run.haystack();
      this.hits = new Uint8Array(hay.length);
      for (let at = 0; at < hay.length; at++) {
        let every = 1;
        for (const word of words) if (!hay[at].includes(word)) { every = 0; break; }
        this.hits[at] = every;
      }
    }
    if (!render) return;
    this.body.scrollTop = 0;
    this.view.render();
    setText($("said"), `${counted(this.count, "group")} found.`);
  }

  arrange() {
    const { run, seq, partition } = this.view, there = run.groupsUpto(seq);
    const inPartition = run.tables.groups.of("partition");
    if (this.order.length < there) this.order = new Uint32Array(Math.max(there, run.n));
    let found = 0;
    for (let group = 0; group < there; group++) {
      if (partition >= 0 && inPartition[group] !== partition) continue;
      if (this.hits && !this.hits[group]) continue;
      if (this.phase >= 0 && run.phaseAt(group, seq) !== this.phase) continue;
      this.order[found++] = group;
    }
    this.count = found;
    const key = this.keys();
    if (key) this.sortOrder(key);
    else if (this.down) this.order.subarray(0, found).reverse();
  }

  sortOrder(key) {
    const part = this.order.subarray(0, this.count), way = this.down ? -1 : 1;
    if (key.texts) {
      part.sort((a, b) => way * (key.texts[a] < key.texts[b] ? -1 : key.texts[a] > key.texts[b] ? 1 : a - b));
      return;
    }
    const values = key.values; // what has no value comes last, either way
    part.sort((a, b) => {
      const x = values[a], y = values[b];
      if (x === y) return a - b;
      if (x !== x) return y !== y ? a - b : 1;
      if (y !== y) return -1;
      return way * (x - y);
    });
  }

  // What to sort by; null for the order in which groups were submitted.
  keys() {
    const { run, seq, metric } = this.view, groups = run.tables.groups;
    const each = (value) => {
      if (!this.values || this.values.length < run.n) this.values = new Float64Array(run.n);
      for (let at = 0; at < this.count; at++) this.values[this.order[at]] = value(this.order[at]);
      return { values: this.values };
    };
    const sums = (value) => each((group) => value(run.summaryAt(group, seq, metric, this.into)));
    switch (this.sort) {
      case "group": return { texts: run.ids };
      case "dataset": return each((group) => this.rank(run.meta.datasets, groups.of("dataset")[group]));
      case "partition": return { values: groups.of("partition") };
      case "version": return { values: groups.of("stamp") };
      case "phase": return each((group) => run.phaseAt(group, seq));
      case "lag": return each((group) => run.lagAt(group, seq));
      case "took": return each((group) => run.tookAt(group, seq));
      case "sessions": return sums((summary) => summary.finished - summary.failed / 10000);
      case "tokens": return sums((summary) => summary.tokens);
      case "metric": return sums((summary) => (summary.values ? summary.sum / summary.values : NaN));
      case "why": return each((group) => this.whyRank(group));
      default: return null;
    }
  }

  rank(names, at) {
    if (this.ranked !== names) {
      this.ranked = names;
      this.ranks = names.map((name) => names.filter((other) => other < name).length);
    }
    return this.ranks[at];
  }

  whyRank(group) {
    const { run, seq } = this.view, evicted = run.evictionAt(group, seq), taken = run.takenAt(group, seq);
    if (evicted >= 0) return -1e6 + run.tables.evictions.of("reasons")[evicted];
    return taken >= 0 ? run.tables.taken.of("batch")[taken] : NaN;
  }

  render() {
    this.arrange();
    const { run, seq } = this.view, there = run.groupsUpto(seq);
    const text = this.count === there ? count(there) : `${count(this.count)} of ${count(there)}`;
    setText($("groups-count"), text);
    this.table.setAttribute("aria-rowcount", String(this.count + 1));
    this.spacer.style.height = `${this.count * ROW}px`;
    const none = $("none");
    none.hidden = this.count > 0;
    if (!this.count) setText(none, there ? "No group matches." : "No group has been submitted at this moment.");
    this.paint();
  }

  paint() {
    const top = this.body.scrollTop, height = this.body.clientHeight;
    const first = Math.max(0, Math.floor(top / ROW) - 2), last = Math.min(this.count, Math.ceil((top + height) / ROW) + 2);
    while (this.pool.length < last - first) this.pool.push(this.row());
    this.pool.forEach((row, at) => {
      const place = first + at;
      if (place >= last) { row.node.hidden = true; return; }
      row.node.hidden = false;
      row.node.style.transform = `translateY(${place * ROW}px)`;
      this.fill(row, this.order[place], place);
    });
  }

  row() {
    const cells = this.columns.map(([id]) => el("div", { role: "gridcell", class: NUMERIC.has(id) ? "right" : "" }));
    const phase = this.columns.findIndex(([id]) => id === "phase"), dot = swatch("transparent"), word = el("span");
    cells[phase].append(dot, word);
    cells[phase].classList.add("badge");
    const node = el("div", { class: "row", role: "row" }, ...cells);
    const row = { node, cells, dot, word, group: -1 };
    node.addEventListener("click", () => { this.view.choose(row.group); });
    this.body.append(node);
    return row;
  }

  fill(row, group, place) {
    const { run, seq, metric } = this.view, groups = run.tables.groups;
    const phase = run.phaseAt(group, seq), summary = run.summaryAt(group, seq, metric, this.into);
    row.group = group;
    const chosen = group === this.view.chosen;
    row.node.classList.toggle("chosen", chosen);
    row.node.classList.toggle("odd", place % 2 === 1);
    row.node.setAttribute("aria-selected", String(chosen));
    row.node.setAttribute("aria-rowindex", String(place + 2));
    this.columns.forEach(([id], at) => {
      const cell = row.cells[at];
      switch (id) {
        case "group": setText(cell, run.ids[group]); cell.title = run.prompts[group] ?? ""; break;
        case "phase": setText(row.word, run.meta.phases[phase] ?? ""); row.dot.style.background = PHASE_COLOURS[phase]; break;
        case "dataset": setText(cell, run.meta.datasets[groups.of("dataset")[group]]); break;
        case "partition": setText(cell, run.meta.partitions[groups.of("partition")[group]]); break;
        case "version": setText(cell, String(groups.of("stamp")[group])); break;
        case "lag": setText(cell, number(run.lagAt(group, seq))); break;
        case "sessions": setText(cell, `${summary.finished}/${groups.of("size")[group]}${summary.failed ? ` (${summary.failed})` : ""}`); break;
        case "tokens": setText(cell, summary.tokens ? brief(summary.tokens) : ""); break;
        case "metric": setText(cell, summary.values ? number(summary.sum / summary.values) : ""); break;
        case "submitted": setText(cell, this.submitted(group)); break;
        case "took": setText(cell, span(run.tookAt(group, seq))); break;
        case "why": setText(cell, this.why(group)); cell.title = cell.textContent; break;
      }
    });
  }

  submitted(group) {
    const { run } = this.view, seq = run.tables.groups.of("seq")[group];
    if (run.meta.first_seq && seq <= run.meta.first_seq) return "before";
    return run.length < 600 ? `${run.timeOf(seq).toFixed(2)} s` : clock(run.timeOf(seq));
  }

  why(group) {
    const { run, seq } = this.view, evicted = run.evictionAt(group, seq);
    if (evicted >= 0) return reasonsOf(run, evicted);
    const taken = run.takenAt(group, seq), phase = run.phaseAt(group, seq);
    return taken >= 0 && phase >= SAMPLED ? `batch ${run.tables.taken.of("batch")[taken]}` : "";
  }

  key(event) {
    if (event.target !== this.table && !event.target.closest?.(".body")) return;
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !this.count) return;
    event.preventDefault();
    const now = this.order.subarray(0, this.count).indexOf(this.view.chosen);
    const next = Math.min(this.count - 1, Math.max(0, now < 0 ? (by > 1e6 ? this.count - 1 : 0) : now + by));
    this.view.choose(this.order[next]);
    this.reveal(next);
  }

  reveal(place) {
    const top = place * ROW, height = this.body.clientHeight;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    else if (top + ROW > this.body.scrollTop + height) this.body.scrollTop = top + ROW - height;
  }
}

const NUMERIC = new Set(["version", "lag", "sessions", "tokens", "metric", "submitted", "took"]);
const FALLING = new Set(["lag", "tokens", "metric", "took", "sessions"]);

function reasonsOf(run, row) {
  const bits = run.tables.evictions.of("reasons")[row];
  return run.meta.reasons.filter((_, at) => bits & (1 << at)).join(", ");
}
