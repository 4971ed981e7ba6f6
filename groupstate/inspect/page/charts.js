// The timeline and the histograms, drawn by uPlot.

const SECONDS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  10800, 21600, 43200, 86400, 172800, 604800, 1209600, 2419200,
];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8];
const POINTS = 900;

function axis(options) {
  return {
    stroke: () => css("--muted"),
    font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif",
    labelSize: 18,
    labelGap: 2,
    grid: { stroke: () => css("--grid"), width: 1 },
    ticks: { stroke: () => css("--grid"), width: 1, size: 4 },
    ...options,
  };
}

const upright = (label) => axis({
  label, size: 52, incrs: WHOLE, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? brief(tick) : "")),
});

// Keep a chart as wide as its place.
function fitted(place, make) {
  let plot = null;
  const size = () => ({ width: Math.max(160, place.clientWidth), height: place.clientHeight });
  new ResizeObserver(() => {
    const next = size();
    if (plot && (plot.width !== next.width || plot.height !== next.height)) plot.setSize(next);
  }).observe(place);
  return {
    get plot() { return plot; },
    make(...given) {
      plot?.destroy();
      plot = make(size(), ...given);
      return plot;
    },
  };
}

class Timeline {
  constructor(view) {
    this.view = view;
    this.place = $("timeline-plot");
    this.shown = new Set([SAMPLED, FAILURE, FINISHED, RUNNING, PENDING]);
    this.chart = fitted(this.place, (size) => this.made(size));
    this.chips = new Map();
    this.later = el("div", { class: "later" });
    this.now = el("div", { class: "now" });
    this.legend();
  }

  legend() {
    for (const phase of STACK.slice().sort((a, b) => a - b)) {
      const name = el("span", { class: "label" });
      const value = el("span", { class: "value" });
      const chip = el("button", {
        type: "button",
        class: "key",
        "aria-pressed": String(this.shown.has(phase)),
        onclick: () => {
          if (!this.shown.delete(phase)) this.shown.add(phase);
          chip.setAttribute("aria-pressed", String(this.shown.has(phase)));
          this.build();
          this.view.render();
        },
      }, swatch(PHASE_COLOURS[phase]), name, value);
      this.chips.set(phase, { chip, name, value });
      $("legend").append(chip);
    }
  }

  // Where an event lies on the axis, and the other way round.
  x(seq) { return this.view.axis === "time" ? this.view.run.timeOf(seq) : this.view.run.turnOf(seq); }
  seq(x) { return this.view.axis === "time" ? this.view.run.seqAt(x) : this.view.run.seqAtTurn(x); }
  get end() { return this.view.axis === "time" ? this.view.run.length : this.view.run.turnOf(this.view.run.lastSeq); }

  get turns() { return Math.max(1, this.view.run.tables.versions.n); }

  build() {
    const run = this.view.run, end = this.view.axis === "time" ? run.length : this.turns;
    const xs = new Float64Array(POINTS), seqs = new Float64Array(POINTS);
    for (let point = 0; point < POINTS; point++) {
      xs[point] = (end * point) / (POINTS - 1);
      seqs[point] = this.seq(xs[point]);
      if (point) seqs[point] = Math.max(seqs[point], seqs[point - 1]);
    }
    seqs[POINTS - 1] = run.lastSeq;
    this.counts = run.series(seqs, this.view.partition);
    this.xs = xs;
    this.seqs = seqs;
    const order = STACK.filter((phase) => this.shown.has(phase)), sums = new Float64Array(POINTS);
    const stacked = [];
    for (const phase of order) {
      for (let point = 0; point < POINTS; point++) sums[point] += this.counts[phase][point];
      stacked.push({ phase, sums: sums.slice() });
    }
    stacked.reverse(); // the highest is drawn first, and the lower ones over it
    const key = `${this.view.axis} ${order}`;
    this.data = [xs, ...stacked.map((part) => part.sums)];
    this.parts = stacked;
    if (this.chart.plot && this.key === key) {
      this.chart.plot.setData(this.data);
    } else {
      this.key = key;
      this.place.replaceChildren();
      this.chart.make();
    }
    for (const [phase, chip] of this.chips) setText(chip.name, run.meta.phases[phase]);
  }

  made(size) {
    const byTime = this.view.axis === "time", versions = this.view.run.tables.versions;
    const plot = new uPlot({
      ...size,
      padding: [8, 36, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: {
        x: { time: false, range: () => [0, Math.max(byTime ? this.view.run.length : this.turns, 1e-6)] },
        y: { range: (_, low, high) => [0, Math.max(1, high) * 1.05] },
      },
      axes: [
        byTime
          ? axis({
            label: "time since the beginning (h:mm:ss)", size: 30, space: 90, incrs: SECONDS,
            values: (_, ticks, __, ___, step) => ticks.map((tick) => clock(tick, step < 1)),
          })
          : axis({
            label: "weight version", size: 30, space: 50, incrs: WHOLE,
            values: (_, ticks) => ticks.map((tick) =>
              Number.isInteger(tick) && tick < versions.n ? String(versions.of("version")[tick]) : ""),
          }),
        upright("groups"),
      ],
      series: [{}, ...this.parts.map(({ phase }) => ({
        fill: PHASE_COLOURS[phase], stroke: PHASE_COLOURS[phase], width: 0, points: { show: false },
        paths: uPlot.paths.stepped({ align: 1 }),
      }))],
      hooks: {
        setCursor: [(chart) => this.hover(chart)],
        setSize: [() => this.mark()],
        ready: [(chart) => this.listen(chart)],
      },
    }, this.data, this.place);
    return plot;
  }

  listen(chart) {
    chart.over.append(this.later, this.now);
    let held = false;
    const go = (event) => {
      const left = event.clientX - chart.over.getBoundingClientRect().left;
      const x = Math.min(Math.max(chart.posToVal(left, "x"), 0), this.end);
      this.view.goTo(x >= this.end ? this.view.run.lastSeq : this.seq(x));
    };
    chart.over.addEventListener("pointerdown", (event) => {
      held = event.button === 0;
      if (held) { chart.over.setPointerCapture(event.pointerId); go(event); }
    });
    chart.over.addEventListener("pointermove", (event) => { if (held) go(event); });
    for (const name of ["pointerup", "pointercancel"]) chart.over.addEventListener(name, () => { held = false; });
    chart.over.addEventListener("pointerleave", () => tip.hide());
  }

  hover(chart) {
    const { left, idx } = chart.cursor;
    if (left === undefined || left < 0 || idx === null || idx === undefined) return tip.hide();
    const box = chart.over.getBoundingClientRect(), run = this.view.run, seq = this.seqs[idx];
    const rows = STACK.slice().reverse().filter((phase) => this.shown.has(phase)).map((phase) =>
      el("div", { class: "tip-row" }, swatch(PHASE_COLOURS[phase]), run.meta.phases[phase],
        el("b", {}, count(this.counts[phase][idx]))));
    const head = `${clock(run.timeOf(seq))}, version ${run.versionAt(seq)}`;
    tip.show(box.left + left, box.top + chart.cursor.top, [el("div", { class: "tip-head" }, head), ...rows]);
  }

  // Where the slider stands, and what is later than that.
  mark() {
    const chart = this.chart.plot;
    if (!chart || !this.now.isConnected) return;
    const at = chart.valToPos(this.x(this.view.seq), "x");
    this.now.style.transform = `translateX(${at}px)`;
    this.later.style.transform = `translateX(${at}px)`;
    this.later.style.width = `${Math.max(0, chart.over.clientWidth - at)}px`;
  }

  render() {
    const sums = this.view.sums;
    for (const [phase, chip] of this.chips) setText(chip.value, count(sums[phase]));
    this.mark();
  }

  redraw() { this.chart.plot?.redraw(false); }
}

class Bars {
  // label: of the horizontal axis; what: what is counted; colours: per series, from the bottom up.
  constructor(place, { label, what, colours, names }) {
    this.place = place;
    this.options = { label, what, colours, names };
    this.chart = fitted(place, (size) => this.made(size));
    this.key = "";
  }

  // places: where the bars stand; words: what to call them; stacks: per series its counts; most: the highest at the end.
  show({ places, words, stacks, most, label, width, few }) {
    const sums = new Float64Array(places.length), layers = [];
    for (const stack of stacks) {
      for (let at = 0; at < places.length; at++) sums[at] += stack[at];
      layers.push(sums.slice());
    }
    this.words = words;
    this.stacks = stacks;
    this.most = most;
    this.low = places.length ? places[0] - width : 0;
    this.high = places.length ? places[places.length - 1] + width : 1;
    this.few = few;
    this.options.label = label;
    this.data = [places, ...layers.reverse()];
    const key = `${label} ${places.join()}`;
    if (this.chart.plot && this.key === key) {
      this.chart.plot.setData(this.data);
    } else {
      this.key = key;
      this.place.replaceChildren();
      this.chart.make();
    }
  }

  made(size) {
    const { label, what, colours } = this.options, few = this.few;
    const bars = uPlot.paths.bars({ size: [few ? 0.7 : 0.94, 72], align: 0 });
    const plot = new uPlot({
      ...size,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: {
        x: { time: false, range: () => [this.low, this.high] },
        y: { range: () => [0, Math.max(1, this.most) * 1.06] },
      },
      axes: [
        axis({
          label, size: 30, space: 44,
          splits: few ? () => thinned(this.data[0], this.chart.plot?.width ?? size.width) : undefined,
          values: (_, ticks) => ticks.map((tick) => number(tick) || "0"),
        }),
        upright(what),
      ],
      series: [{}, ...colours.slice().reverse().map((colour) => ({
        fill: colour, stroke: colour, width: 0, points: { show: false }, paths: bars,
      }))],
      hooks: {
        setCursor: [(chart) => this.hover(chart)],
        ready: [(chart) => chart.over.addEventListener("pointerleave", () => tip.hide())],
      },
    }, this.data, this.place);
    return plot;
  }

  hover(chart) {
    const { left, idx } = chart.cursor;
    if (left === undefined || left < 0 || idx === null || idx === undefined || !this.words[idx]) return tip.hide();
    const box = chart.over.getBoundingClientRect(), { colours, names } = this.options;
    const rows = this.stacks.map((stack, at) =>
      el("div", { class: "tip-row" }, swatch(colours[at]), names[at], el("b", {}, count(stack[idx]))));
    tip.show(box.left + left, box.top + chart.cursor.top, [el("div", { class: "tip-head" }, this.words[idx]), ...rows]);
  }

  redraw() { this.chart.plot?.redraw(false); }
}

// So many of the places that their labels have room.
function thinned(places, width) {
  const every = Math.max(1, Math.ceil((places.length * 44) / Math.max(60, width - 60)));
  return Array.from(places).filter((_, at) => at % every === 0);
}

class Histograms {
  constructor(view) {
    this.view = view;
    const [sampled, evicted] = [PHASE_COLOURS[COMMITTED], PHASE_COLOURS[EVICTED]];
    this.lag = new Bars($("lag-plot"), { what: "groups", colours: [sampled, evicted], names: ["sampled", "evicted"] });
    $("lag-legend").append(el("span", {}, swatch(sampled), "sampled"), el("span", {}, swatch(evicted), "evicted"));
    this.metric = new Bars($("metric-plot"), {
      what: "sessions", colours: [PHASE_COLOURS[FINISHED]], names: ["sessions"],
    });
  }

  // The bars' scale is that of the run's end, so that they grow as the slider moves.
  build() {
    const { run, partition, metric } = this.view, end = run.lastSeq;
    const { sampled, evicted } = run.lags(end, partition);
    this.lagMost = 0;
    for (const lag of new Set([...sampled.keys(), ...evicted.keys()])) {
      this.lagMost = Math.max(this.lagMost, (sampled.get(lag) ?? 0) + (evicted.get(lag) ?? 0));
    }
    const found = metric < 0 ? null : run.metricAt(metric, end, partition);
    this.metricMost = found ? Math.max(0, ...found.counts) : 0;
  }

  render() {
    this.renderLag();
    this.renderMetric();
  }

  renderLag() {
    const { run, partition, seq } = this.view, { sampled, evicted } = run.lags(seq, partition);
    const highest = Math.max(4, run.lagMax), step = Math.ceil((highest + 1) / 60);
    const places = [], low = [], high = [], words = [];
    for (let from = 0; from <= highest; from += step) {
      let inBatches = 0, thrown = 0;
      for (let lag = from; lag < from + step; lag++) {
        inBatches += sampled.get(lag) ?? 0;
        thrown += evicted.get(lag) ?? 0;
      }
      places.push(from);
      low.push(inBatches);
      high.push(thrown);
      words.push(step > 1 ? `lag ${from} to ${from + step - 1}` : `lag ${from}`);
    }
    const label = "lag (weight versions)";
    this.lag.show({ places, words, stacks: [low, high], most: this.lagMost, label, width: step * 0.6, few: true });
  }

  renderMetric() {
    const { run, partition, seq, metric } = this.view;
    if (metric < 0) return this.metric.show({ places: [0], words: [""], stacks: [[0]], most: 1, label: "no metric yet", width: 1, few: true });
    const { bins, counts, count: sessions, mean } = run.metricAt(metric, seq, partition);
    setText($("metric-words"), sessions ? `mean ${number(mean)}, ${counted(sessions, "session")}` : "no session has ended");
    const places = [], words = [];
    for (let at = 0; at < bins.count; at++) {
      if (bins.few) {
        places.push(bins.few[at]);
        words.push(`${run.meta.metrics[metric]} ${number(bins.few[at])}`);
      } else {
        const from = bins.low + at * bins.width;
        places.push(from + bins.width / 2);
        words.push(`${number(from)} to ${number(from + bins.width)}`);
      }
    }
    const gaps = places.slice(1).map((place, at) => place - places[at]);
    const width = bins.few ? 0.6 * (gaps.length ? Math.min(...gaps) : 1) : bins.width * 0.75;
    const label = run.meta.metrics[metric];
    this.metric.show({ places, words, stacks: [Array.from(counts)], most: this.metricMost, label, width, few: !!bins.few });
  }

  redraw() { this.lag.redraw(); this.metric.redraw(); }
}

class Evictions {
  constructor(view) {
    this.view = view;
    this.rows = [];
  }

  build() {
    const { run, partition } = this.view;
    const atEnd = run.evictedBy(run.lastSeq, partition), reasons = run.meta.reasons;
    const order = reasons.map((_, at) => at).filter((at) => atEnd[at]).sort((a, b) => atEnd[b] - atEnd[a]);
    this.most = Math.max(1, ...atEnd);
    const key = order.join();
    if (key === this.key) return;
    this.key = key;
    this.rows = order.map((at) => {
      const bar = el("div", { class: "bar" }), value = el("span", { class: "value" });
      const words = REASON_WORDS[reasons[at]] ?? "";
      const row = el("div", { class: "bar-row" },
        el("div", { class: "bar-words" }, el("b", {}, reasons[at]), el("span", { class: "muted" }, words)),
        el("div", { class: "bar-line" }, el("div", { class: "bar-track" }, bar), value));
      return { at, bar, value, row };
    });
    const none = el("p", { class: "none" }, "No group was evicted in this run.");
    $("evictions").replaceChildren(...(this.rows.length ? this.rows.map(({ row }) => row) : [none]));
  }

  render() {
    const { run, partition, seq, sums } = this.view, counts = run.evictedBy(seq, partition);
    const all = sums.reduce((sum, value) => sum + value, 0);
    for (const { at, bar, value } of this.rows) {
      bar.style.transform = `scaleX(${counts[at] / this.most})`;
      setText(value, counts[at] ? `${count(counts[at])}  (${percent(counts[at], all)})` : "0");
    }
  }
}
