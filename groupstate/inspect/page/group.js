// One group: its sessions as bars in time, and everything that happened to it as a list.

const LEFT = 44, TOP = 24, BOTTOM = 26, RIGHT = 14;

class OneGroup {
  constructor(view) {
    this.view = view;
    this.span = "life";
    this.boxes = [];
    for (const span of ["life", "sessions"]) {
      $(`span-${span}`).addEventListener("click", () => {
        this.span = span;
        for (const each of ["life", "sessions"]) $(`span-${each}`).setAttribute("aria-pressed", String(each === span));
        this.render();
      });
    }
    this.watch = new ResizeObserver(() => this.draw());
  }

  build() {
    const { run, chosen } = this.view;
    if (chosen < 0) return;
    const key = `${run.generation} ${chosen}`;
    if (this.key === key) return;
    if (this.group !== chosen) this.frame(chosen);
    this.group = chosen;
    this.key = key;
    this.attempts = this.attemptsOf(chosen);
    this.events = this.eventsOf(chosen);
    this.list();
  }

  // The parts that stay while the group is shown.
  frame(group) {
    const { run } = this.view;
    this.badge = el("span", {});
    this.facts = el("p", { class: "muted facts-line" });
    this.canvas = el("canvas", { role: "img" });
    this.place = el("div", { class: "gantt" }, this.canvas);
    this.key_ = el("div", { class: "legend small" });
    this.eventsTitle = el("h3", {});
    this.items = el("ol", { class: "events", tabIndex: 0, "aria-label": "Events of the group" });
    const prompt = run.prompts[group];
    $("group-title").replaceChildren("Group ", el("span", { class: "mono" }, run.ids[group]));
    $("group-body").replaceChildren(
      el("div", { class: "line" }, this.badge, this.facts),
      el("p", { class: prompt ? "prompt" : "prompt muted", tabIndex: 0, "aria-label": "Prompt" },
        prompt ?? "The prompt can't be shown: it isn't kept any more, or was left out."),
      this.place, this.key_, this.eventsTitle, this.items);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => tip.hide());
    this.watch.disconnect();
    this.watch.observe(this.place);
    this.place.scrollTop = 0;
  }

  attemptsOf(group) {
    const { run } = this.view, table = run.tables.attempts, texts = run.texts;
    const ended = run.attemptRows(group).map((row) => ({
      session: table.of("session")[row],
      attempt: table.of("attempt")[row],
      start: table.of("start")[row],
      end: table.of("seq")[row],
      outcome: run.meta.outcomes[table.of("outcome")[row]],
      again: table.of("again")[row],
      rows: table.of("rows")[row],
      tokens: table.of("tokens")[row],
      worker: texts[table.of("worker")[row]],
      message: texts[table.of("message")[row]],
      metrics: run.meta.metrics
        .map((name, at) => [name, table.of(`metric ${at}`)[row]])
        .filter(([, value]) => value === value && value !== undefined),
    }));
    const open = (run.openOf.get(group) ?? []).map(([, session, attempt, start, worker]) => ({
      session, attempt, start, end: Infinity, outcome: "open", worker: texts[worker], message: "", metrics: [],
    }));
    return [...ended, ...open];
  }

  eventsOf(group) {
    const { run } = this.view, meta = run.meta, found = [], groups = run.tables.groups;
    const add = (seq, text, kind = "") => found.push({ seq, text, kind });
    const before = (seq) => meta.first_seq && seq <= meta.first_seq;
    const submitted = groups.of("seq")[group], dataset = meta.datasets[groups.of("dataset")[group]];
    const cause = { submit: "by the user", admission: "by the run's own admission", refill: "as a refill" };
    const position = groups.of("position")[group];
    add(submitted, [
      `${before(submitted) ? "there before the page begins, submitted" : "submitted"} ${cause[meta.causes[groups.of("cause")[group]]]}`,
      counted(groups.of("size")[group], "session"), `version ${groups.of("stamp")[group]}`,
      ...(dataset ? [`dataset ${dataset}`] : []), ...(position >= 0 ? [`prompt ${position} of the source`] : []),
    ].join(", "));
    for (const attempt of this.attempts) {
      const tries = attempt.attempt > 1 ? `, attempt ${attempt.attempt}` : "";
      const who = `session ${attempt.session}`;
      if (attempt.start && !(before(attempt.start) && attempt.start === attempt.end)) {
        add(attempt.start, `${who} began${tries}${attempt.worker ? ` on ${attempt.worker}` : ""}`);
      }
      if (attempt.outcome !== "open" && attempt.outcome !== "requeued") add(attempt.end, this.ending(attempt, who, tries), attempt.outcome);
    }
    const phases = run.tables.phases, taken = run.tables.taken;
    let last = -1;
    for (const row of run.phaseRows(group)) {
      const phase = phases.of("phase")[row], seq = phases.of("seq")[row];
      if (phase === FINISHED || phase === FAILURE) {
        add(seq, last >= SAMPLED ? `came back untrained: ${meta.phases[phase]} again` : phase === FINISHED ? "finished" : "failed");
      } else if (phase === SAMPLED) {
        const at = run.takenAt(group, seq);
        add(seq, at < 0 ? "sampled" : `sampled into batch ${taken.of("batch")[at]}, lag ${taken.of("lag")[at]}`);
      } else if (phase === COMMITTED) {
        const trained = meta.partitions[run.tables.groups.of("partition")[group]] === "train";
        add(seq, trained ? "committed: it is trained on, and has left" : "committed: it ended as validation, and has left");
      }
      last = phase;
    }
    const evictions = run.tables.evictions, evicted = run.evictionOf.a[group] - 1;
    if (evicted >= 0) {
      const message = run.texts[evictions.of("message")[evicted]], credit = evictions.of("credit")[evicted];
      add(evictions.of("seq")[evicted], `evicted: ${reasonsOf(run, evicted)}, lag ${evictions.of("lag")[evicted]}, ` +
        `${counted(credit, "refill")} earned${message ? `: ${message}` : ""}`, "evicted");
    }
    for (const row of run.requeueRows(group)) {
      const message = run.texts[run.tables.requeues.of("message")[row]];
      add(run.tables.requeues.of("seq")[row], `started over${message ? `: ${message}` : ""}; what it had is dropped`, "requeued");
    }
    const fenced = run.tables.fenced, whose = fenced.of("group");
    for (let row = 0; row < fenced.n; row++) {
      if (whose[row] !== group) continue;
      const what = run.texts[fenced.of("what")[row]];
      add(fenced.of("seq")[row], `a result of session ${fenced.of("session")[row]} changed nothing (${what})`);
    }
    return found.map((event, at) => ({ ...event, at })).sort((a, b) => a.seq - b.seq || a.at - b.at);
  }

  ending(attempt, who, tries) {
    const took = attempt.start ? ` after ${span(this.view.run.timeOf(attempt.end) - this.view.run.timeOf(attempt.start))}` : " before it began";
    const values = attempt.metrics.map(([name, value]) => `${name} ${number(value)}`).join(", ");
    if (attempt.outcome === "finished") {
      const tokens = attempt.tokens ? `, ${counted(attempt.tokens, "token")}` : "";
      return `${who} finished${took}${tries}${tokens}${values ? `, ${values}` : ""}`;
    }
    const again = attempt.again ? "; it will be tried again" : "";
    return `${who}: ${attempt.outcome}${took}${tries}${attempt.message ? `: ${attempt.message}` : ""}${again}`;
  }

  list() {
    const { run } = this.view, begin = run.timeOf(run.tables.groups.of("seq")[this.group]);
    this.nodes = this.events.map((event) => {
      const node = el("li", {},
        el("button", { type: "button", class: "seq", title: "Move the slider there", onclick: () => this.view.goTo(event.seq) }, String(event.seq)),
        el("span", { class: "when" }, `+${span(run.timeOf(event.seq) - begin)}`),
        el("span", { class: "what" }, event.text));
      return node;
    });
    this.items.replaceChildren(...this.nodes);
    const outcomes = [...new Set(this.attempts.map((attempt) => attempt.outcome))];
    this.key_.replaceChildren(...outcomes.map((outcome) =>
      el("span", {}, swatch(OUTCOME_COLOURS[outcome]), outcome === "open" ? "still open" : outcome)));
  }

  render() {
    const { run, seq, chosen, metric } = this.view;
    if (chosen < 0) return;
    this.build();
    const phase = run.phaseAt(chosen, seq);
    const there = phase >= 0;
    this.badge.replaceChildren(there ? badge(phase, run.meta.phases[phase]) : el("span", { class: "badge" }, "not submitted yet"));
    const summary = run.summaryAt(chosen, seq, metric, {}), size = run.tables.groups.of("size")[chosen];
    const lag = run.lagAt(chosen, seq);
    setText(this.facts, [
      `${summary.finished} of ${size} finished${summary.failed ? `, ${summary.failed} failed` : ""}`,
      ...(summary.tokens ? [counted(summary.tokens, "token")] : []),
      ...(summary.values ? [`${run.meta.metrics[metric]} ${number(summary.low)}${summary.high > summary.low ? ` to ${number(summary.high)}` : " in all"}`] : []),
      ...(lag === lag ? [`lag ${lag}`] : []),
    ].join(" \u00b7 "));
    this.facts.title = this.facts.textContent;
    let later = 0;
    this.events.forEach((event, at) => {
      const hidden = event.seq > seq;
      later += hidden;
      this.nodes[at].classList.toggle("is-later", hidden);
    });
    setText(this.eventsTitle, `Events${later ? ` (${later} later than the slider)` : ""}`);
    this.draw();
  }

  // The stretch of time that the bars are drawn over: seconds.
  stretch() {
    const { run } = this.view, last = run.lastSeq, begin = run.timeOf(run.tables.groups.of("seq")[this.group]);
    const ends = this.attempts.map((attempt) => (attempt.end === Infinity ? last : attempt.end));
    const open = this.attempts.some((attempt) => attempt.end === Infinity);
    let end = Math.max(...ends.map((seq) => run.timeOf(seq)), begin);
    if (this.span === "life") {
      const phase = run.phaseAt(this.group, last);
      end = phase === EVICTED || phase === COMMITTED ? run.timeOf(this.events[this.events.length - 1].seq) : run.length;
    } else {
      const starts = this.attempts.filter((attempt) => attempt.start).map((attempt) => run.timeOf(attempt.start));
      if (starts.length && !open) return this.padded(Math.min(...starts), end);
    }
    return this.padded(begin, end);
  }

  padded(begin, end) { return [begin, end > begin ? end : begin + 1e-3]; }

  draw() {
    if (this.view.chosen < 0 || !this.place?.isConnected || !this.attempts) return;
    const { run, seq } = this.view, size = run.tables.groups.of("size")[this.group];
    const step = size <= 12 ? 20 : size <= 40 ? 14 : 8;
    const width = this.place.clientWidth, height = TOP + size * step + BOTTOM, scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.canvas.setAttribute("aria-label", `Sessions in time; the list of events says the same in words`);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    const [begin, end] = this.stretch(), across = width - LEFT - RIGHT;
    const x = (seconds) => LEFT + (across * (Math.min(Math.max(seconds, begin), end) - begin)) / (end - begin);
    this.axisOf(pen, begin, end, x, width, height);
    this.versionsOf(pen, begin, end, x, height);
    this.bars(pen, x, step, end);
    this.labels(pen, size, step);
    this.turns(pen, x, begin, end, height);
    this.future(pen, x(run.timeOf(seq)), run.timeOf(seq) < end, width, height);
  }

  axisOf(pen, begin, end, x, width, height) {
    const step = SECONDS.find((step) => (end - begin) / step <= Math.max(2, (width - LEFT) / 92)) ?? SECONDS[SECONDS.length - 1];
    pen.textAlign = "center";
    for (let at = 0; at <= end - begin + 1e-9; at += step) {
      const place = Math.round(x(begin + at)) + 0.5;
      pen.strokeStyle = css("--grid");
      pen.beginPath(); pen.moveTo(place, TOP - 4); pen.lineTo(place, height - BOTTOM + 4); pen.stroke();
      if (place < width - 30) {
        pen.fillStyle = css("--muted");
        pen.fillText(at ? span(at).replace(/(\.\d*?)0+ s$/, "$1 s").replace(". s", " s") : "0", place, height - 8);
      }
    }
  }

  // Weight versions that were published meanwhile, while their lines are few enough to be read.
  versionsOf(pen, begin, end, x, height) {
    const { run } = this.view, versions = run.tables.versions, lines = [];
    for (let row = 0; row < versions.n; row++) {
      const at = run.timeOf(versions.of("seq")[row]);
      if (at > begin && at <= end) lines.push([x(at), versions.of("version")[row]]);
    }
    if (lines.length > 40) return;
    let free = LEFT;
    pen.textAlign = "left";
    for (const [place, version] of lines) {
      pen.strokeStyle = css("--muted");
      pen.globalAlpha = 0.35;
      pen.setLineDash([2, 3]);
      pen.beginPath(); pen.moveTo(Math.round(place) + 0.5, TOP - 6); pen.lineTo(Math.round(place) + 0.5, height - BOTTOM); pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
      const text = `v${version}`;
      const wide = pen.measureText(text).width;
      if (place < free || place + wide + 3 > this.place.clientWidth) continue;
      pen.fillStyle = css("--muted");
      pen.fillText(text, place + 3, TOP - 10);
      free = place + wide + 8;
    }
  }

  bars(pen, x, step, end) {
    const { run } = this.view;
    this.boxes = [];
    for (const attempt of this.attempts) {
      const stop = attempt.end === Infinity ? end : run.timeOf(attempt.end);
      const from = attempt.start ? x(run.timeOf(attempt.start)) : x(stop);
      const wide = Math.max(attempt.start ? 2.5 : 5, x(stop) - from);
      const top = TOP + attempt.session * step + (step > 10 ? 3 : 1), tall = step > 10 ? step - 6 : step - 2;
      pen.fillStyle = OUTCOME_COLOURS[attempt.outcome];
      pen.fillRect(from, top, wide, tall);
      if (attempt.outcome !== "finished" && attempt.outcome !== "open" && step > 10) this.cross(pen, from + wide, top, tall);
      this.boxes.push({ left: from - 2, right: from + wide + 2, top: top - 2, bottom: top + tall + 2, attempt });
    }
  }

  // How a bar ended is not told by its colour alone.
  cross(pen, right, top, tall) {
    pen.strokeStyle = css("--text");
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(right + 2, top + 1); pen.lineTo(right + tall - 2, top + tall - 1);
    pen.moveTo(right + tall - 2, top + 1); pen.lineTo(right + 2, top + tall - 1);
    pen.stroke();
    pen.lineWidth = 1;
  }

  labels(pen, size, step) {
    pen.fillStyle = css("--muted");
    pen.textAlign = "right";
    const every = step >= 14 ? 1 : Math.ceil(14 / step);
    for (let session = 0; session < size; session += every) {
      pen.fillText(String(session), LEFT - 8, TOP + session * step + step / 2 + 4);
    }
    pen.textAlign = "left";
    pen.fillText("session", 0, TOP - 10);
  }

  // Where the group came to another phase.
  turns(pen, x, begin, end, height) {
    const { run } = this.view, phases = run.tables.phases;
    for (const row of run.phaseRows(this.group)) {
      const phase = phases.of("phase")[row], at = run.timeOf(phases.of("seq")[row]);
      if (phase <= RUNNING || at < begin || at > end) continue;
      const place = Math.round(x(at)) + 0.5;
      pen.strokeStyle = PHASE_COLOURS[phase];
      pen.lineWidth = 2;
      pen.beginPath(); pen.moveTo(place, TOP - 2); pen.lineTo(place, height - BOTTOM); pen.stroke();
      pen.lineWidth = 1;
      this.boxes.push({
        left: place - 4, right: place + 4, top: TOP - 6, bottom: height - BOTTOM, seq: phases.of("seq")[row],
        words: run.meta.phases[phase],
      });
    }
  }

  future(pen, place, some, width, height) {
    if (!some) return;
    pen.fillStyle = css("--veil");
    pen.fillRect(place, TOP - 8, width - place, height - TOP - BOTTOM + 12);
    pen.fillStyle = css("--accent");
    pen.fillRect(place - 0.5, TOP - 8, 1.5, height - TOP - BOTTOM + 12);
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = this.boxes.find((each) => x >= each.left && x <= each.right && y >= each.top && y <= each.bottom);
    if (!found) return tip.hide();
    const { run } = this.view;
    if (found.words) return tip.show(event.clientX, event.clientY, [found.words, `event ${found.seq}`]);
    const { attempt } = found;
    const length = (attempt.end === Infinity ? run.length : run.timeOf(attempt.end)) - run.timeOf(attempt.start || attempt.end);
    tip.show(event.clientX, event.clientY, [
      el("div", { class: "tip-head" }, `session ${attempt.session}, attempt ${attempt.attempt}`),
      `${attempt.outcome === "open" ? "open for" : `${attempt.outcome} after`} ${span(length)}`,
      ...(attempt.tokens ? [counted(attempt.tokens, "token")] : []),
      ...attempt.metrics.map(([name, value]) => `${name} ${number(value)}`),
      ...(attempt.worker ? [`worker ${attempt.worker}`] : []),
      ...(attempt.message ? [attempt.message.slice(0, 160)] : []),
    ]);
  }
}
