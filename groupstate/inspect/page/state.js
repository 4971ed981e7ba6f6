// The run at any event: everything below is a question about the tables, answered for event `seq`.

const PENDING = 0, RUNNING = 1, FINISHED = 2, FAILURE = 3, SAMPLED = 4, EVICTED = 5, COMMITTED = 6, PHASES = 7;
const CHECKPOINT = 1024;
const BINS_MAX = 24;

class Run {
  constructor() {
    this.meta = null;
    this.tables = {};
    this.ids = [];
    this.texts = [];
    this.prompts = [];
    this.phasePrev = new Column(Int32Array);
    this.phaseLast = new Column(Int32Array);
    this.attemptPrev = new Column(Int32Array);
    this.attemptLast = new Column(Int32Array);
    this.takenPrev = new Column(Int32Array);
    this.takenLast = new Column(Int32Array);
    this.requeuePrev = new Column(Int32Array);
    this.requeueLast = new Column(Int32Array);
    this.evictionOf = new Column(Int32Array);
    this.checkpoints = [];
    this.byPartition = [];
    this.bins = null;
    this.openOf = new Map();
    this.haystacks = [];
    this.generation = 0;
  }

  // Take in what came since; `header` replaces what was known of the whole.
  push({ header, tables }) {
    this.meta = header;
    for (const [name, chunk] of Object.entries(tables)) {
      (this.tables[name] ??= new Grown()).push(chunk);
    }
    for (const id of header.ids) this.ids.push(id);
    for (const text of header.texts) this.texts.push(text);
    for (const prompt of header.prompts) this.prompts.push(prompt);
    const groups = this.tables.groups.n;
    this.link(this.tables.phases, this.phasePrev, this.phaseLast, groups);
    this.link(this.tables.attempts, this.attemptPrev, this.attemptLast, groups);
    this.link(this.tables.taken, this.takenPrev, this.takenLast, groups);
    this.link(this.tables.requeues, this.requeuePrev, this.requeueLast, groups);
    this.evictionOf.pad(groups);
    const evicted = this.tables.evictions.of("group");
    for (let row = 0; row < this.tables.evictions.n; row++) this.evictionOf.a[evicted[row]] = row + 1;
    this.count();
    this.openOf.clear();
    for (const open of header.open) {
      if (!this.openOf.has(open[0])) this.openOf.set(open[0], []);
      this.openOf.get(open[0]).push(open);
    }
    this.bins = null;
    this.haystacks = [];
    this.generation += 1;
  }

  get n() { return this.tables.groups.n; }
  get firstSeq() { return this.tables.events.n ? this.tables.events.of("seq")[0] : 0; }
  get lastSeq() { return this.meta.last_seq; }

  // Per group the row that came last, per row the group's row before it; both plus one, so that 0 is none.
  link(table, prev, last, groups) {
    last.pad(groups);
    const from = prev.n, group = table.of("group");
    prev.pad(table.n);
    for (let row = from; row < table.n; row++) {
      prev.a[row] = last.a[group[row]];
      last.a[group[row]] = row + 1;
    }
  }

  // How many groups there are in each phase after every so many moves, and what each move moved.
  count() {
    const width = Math.max(1, this.meta.partitions.length) * PHASES;
    const table = this.tables.phases, phase = table.of("phase"), group = table.of("group");
    const partition = this.tables.groups.of("partition"), prev = this.phasePrev.a;
    if (!this.counts || this.counts.length !== width) {
      this.counts = new Int32Array(width);
      this.checkpoints = [];
      this.counted = 0;
    }
    const counts = this.counts;
    for (let row = this.counted; row < table.n; row++) {
      if (row % CHECKPOINT === 0) this.checkpoints.push(counts.slice());
      const at = partition[group[row]] * PHASES;
      if (prev[row]) counts[at + phase[prev[row] - 1]] -= 1;
      counts[at + phase[row]] += 1;
    }
    this.counted = table.n;
  }

  // Time -------------------------------------------------------------------------------------------------

  // Seconds from the page's beginning to an event.
  timeOf(seq) {
    const events = this.tables.events;
    if (!events.n) return 0;
    const row = Math.min(Math.max(seq - this.firstSeq, 0), events.n - 1);
    return events.of("at_us")[row] / 1e6;
  }

  // The last event that is no later.
  seqAt(seconds) {
    const events = this.tables.events;
    const count = upper(events.of("at_us"), events.n, seconds * 1e6);
    return count ? events.of("seq")[count - 1] : this.firstSeq;
  }

  get length() { return this.timeOf(this.lastSeq); }

  versionRow(seq) { return this.tables.versions.upto(seq) - 1; }
  versionAt(seq) { return this.tables.versions.of("version")[this.versionRow(seq)] ?? 0; }

  // The same in weight versions: how many have come, and how far the present one is.
  turnOf(seq) {
    const versions = this.tables.versions, row = Math.max(0, this.versionRow(seq));
    const begin = this.timeOf(versions.of("seq")[row] ?? this.firstSeq);
    const end = row + 1 < versions.n ? this.timeOf(versions.of("seq")[row + 1]) : this.length;
    return row + (end > begin ? Math.min(1, (this.timeOf(seq) - begin) / (end - begin)) : 0);
  }

  seqAtTurn(turn) {
    const versions = this.tables.versions, row = Math.min(Math.floor(turn), versions.n - 1);
    if (row < 0) return this.firstSeq;
    const from = versions.of("seq")[row];
    const last = row + 1 < versions.n ? versions.of("seq")[row + 1] - 1 : this.lastSeq;
    const begin = this.timeOf(from), end = row + 1 < versions.n ? this.timeOf(last + 1) : this.length;
    const seq = this.seqAt(begin + (turn - row) * (end - begin));
    return Math.min(Math.max(seq, from), last);
  }

  // Groups -----------------------------------------------------------------------------------------------

  countsAt(seq) {
    const rows = this.tables.phases.upto(seq);
    const from = Math.min(Math.floor(rows / CHECKPOINT), this.checkpoints.length - 1);
    if (from < 0) return new Int32Array(this.counts ? this.counts.length : PHASES);
    const counts = this.checkpoints[from].slice();
    this.move(counts, from * CHECKPOINT, rows);
    return counts;
  }

  // Let the moves `from` up to `to` happen to counts.
  move(counts, from, to) {
    const phase = this.tables.phases.of("phase"), group = this.tables.phases.of("group");
    const partition = this.tables.groups.of("partition"), prev = this.phasePrev.a;
    for (let row = from; row < to; row++) {
      const at = partition[group[row]] * PHASES;
      if (prev[row]) counts[at + phase[prev[row] - 1]] -= 1;
      counts[at + phase[row]] += 1;
    }
  }

  // Counts by phase, of one partition or all (-1).
  phasesAt(seq, partition) {
    return this.summed(this.countsAt(seq), partition);
  }

  summed(counts, partition) {
    const sums = new Array(PHASES).fill(0);
    for (let at = 0; at < counts.length; at++) {
      if (partition < 0 || Math.floor(at / PHASES) === partition) sums[at % PHASES] += counts[at];
    }
    return sums;
  }

  // The same at many events, which rise.
  series(seqs, partition) {
    const counts = new Int32Array(this.counts.length), found = [];
    for (let phase = 0; phase < PHASES; phase++) found.push(new Float64Array(seqs.length));
    let done = 0;
    for (let point = 0; point < seqs.length; point++) {
      const rows = this.tables.phases.upto(seqs[point]);
      this.move(counts, done, rows);
      done = Math.max(done, rows);
      const sums = this.summed(counts, partition);
      for (let phase = 0; phase < PHASES; phase++) found[phase][point] = sums[phase];
    }
    return found;
  }

  groupsUpto(seq) { return this.tables.groups.upto(seq); }

  // A group's row in a table at an event, or -1.
  rowAt(table, prev, last, group, seq) {
    const seqs = this.tables[table].of("seq");
    let row = last.a[group];
    while (row && seqs[row - 1] > seq) row = prev.a[row - 1];
    return row - 1;
  }

  phaseRow(group, seq) { return this.rowAt("phases", this.phasePrev, this.phaseLast, group, seq); }
  phaseAt(group, seq) {
    const row = this.phaseRow(group, seq);
    return row < 0 ? -1 : this.tables.phases.of("phase")[row];
  }

  // A group's rows of a table, oldest first.
  rowsOf(table, prev, last, group) {
    const rows = [];
    for (let row = last.a[group]; row; row = prev.a[row - 1]) rows.push(row - 1);
    return rows.reverse();
  }

  phaseRows(group) { return this.rowsOf("phases", this.phasePrev, this.phaseLast, group); }
  attemptRows(group) { return this.rowsOf("attempts", this.attemptPrev, this.attemptLast, group); }
  takenRows(group) { return this.rowsOf("taken", this.takenPrev, this.takenLast, group); }
  requeueRows(group) { return this.rowsOf("requeues", this.requeuePrev, this.requeueLast, group); }

  evictionAt(group, seq) {
    const row = this.evictionOf.a[group] - 1;
    return row >= 0 && this.tables.evictions.of("seq")[row] <= seq ? row : -1;
  }

  takenAt(group, seq) { return this.rowAt("taken", this.takenPrev, this.takenLast, group, seq); }

  // The lag that the log has of a group: when it was sampled or evicted. NaN before.
  lagAt(group, seq) {
    const evicted = this.evictionAt(group, seq);
    if (evicted >= 0) return this.tables.evictions.of("lag")[evicted];
    const taken = this.takenAt(group, seq);
    return taken >= 0 ? this.tables.taken.of("lag")[taken] : NaN;
  }

  // What a group's sessions have come to: finished, failed, tokens, and the metric's mean.
  summaryAt(group, seq, metric, into) {
    const table = this.tables.attempts, seqs = table.of("seq"), outcome = table.of("outcome");
    const again = table.of("again"), tokens = table.of("tokens"), prev = this.attemptPrev.a;
    const values = metric < 0 ? null : table.of(`metric ${metric}`);
    const requeued = this.rowAt("requeues", this.requeuePrev, this.requeueLast, group, seq);
    const since = requeued < 0 ? 0 : this.tables.requeues.of("seq")[requeued];
    into.finished = into.failed = into.tokens = into.values = into.sum = 0;
    into.low = Infinity; into.high = -Infinity;
    for (let row = this.attemptLast.a[group]; row; row = prev[row - 1]) {
      const at = row - 1;
      if (seqs[at] > seq) continue;
      if (seqs[at] <= since) break;
      if (outcome[at] === 0) {
        into.finished += 1;
        into.tokens += tokens[at];
        const value = values ? values[at] : NaN;
        if (value === value) {
          into.values += 1; into.sum += value;
          if (value < into.low) into.low = value;
          if (value > into.high) into.high = value;
        }
      } else if (!again[at]) {
        into.failed += 1;
      }
    }
    return into;
  }

  // Submission to the end of the last session, to leaving, or to now: seconds.
  tookAt(group, seq) {
    const begin = this.timeOf(this.tables.groups.of("seq")[group]);
    const phases = this.tables.phases;
    for (let row = this.phaseLast.a[group]; row; row = this.phasePrev.a[row - 1]) {
      const phase = phases.of("phase")[row - 1], at = phases.of("seq")[row - 1];
      if (at <= seq && phase <= RUNNING) break;
      if (at <= seq && (phase === FINISHED || phase === FAILURE)) {
        const before = this.phasePrev.a[row - 1];
        const ended = before && phases.of("phase")[before - 1] > RUNNING ? -1 : at;
        if (ended >= 0) return this.timeOf(ended) - begin;
      }
    }
    return this.timeOf(seq) - begin;
  }

  // Histograms -------------------------------------------------------------------------------------------

  evictedBy(seq, partition) {
    const table = this.tables.evictions, rows = table.upto(seq), reasons = table.of("reasons");
    const group = table.of("group"), inPartition = this.tables.groups.of("partition");
    const counts = new Array(this.meta.reasons.length).fill(0);
    for (let row = 0; row < rows; row++) {
      if (partition >= 0 && inPartition[group[row]] !== partition) continue;
      for (let bits = reasons[row], at = 0; bits; bits >>= 1, at++) if (bits & 1) counts[at] += 1;
    }
    return counts;
  }

  // Per lag: groups sampled and groups evicted with it.
  lags(seq, partition) {
    const inPartition = this.tables.groups.of("partition");
    const counted = (table) => {
      const rows = table.upto(seq), lag = table.of("lag"), group = table.of("group"), counts = new Map();
      for (let row = 0; row < rows; row++) {
        if (partition >= 0 && inPartition[group[row]] !== partition) continue;
        counts.set(lag[row], (counts.get(lag[row]) ?? 0) + 1);
      }
      return counts;
    };
    return { sampled: counted(this.tables.taken), evicted: counted(this.tables.evictions) };
  }

  get lagMax() {
    if (this.lagMaxOf !== this.generation) {
      this.lagMaxOf = this.generation;
      this.lagMaxFound = 0;
      for (const table of [this.tables.taken, this.tables.evictions]) {
        const lag = table.of("lag");
        for (let row = 0; row < table.n; row++) this.lagMaxFound = Math.max(this.lagMaxFound, lag[row]);
      }
    }
    return this.lagMaxFound;
  }

  // Bins of a metric over the whole run, so that they stay where they are as the slider moves.
  binsOf(metric) {
    if (this.bins && this.bins.metric === metric) return this.bins;
    const table = this.tables.attempts, values = table.of(`metric ${metric}`), seen = new Set();
    let low = Infinity, high = -Infinity;
    for (let row = 0; row < table.n; row++) {
      const value = values[row];
      if (value !== value) continue;
      if (value < low) low = value;
      if (value > high) high = value;
      if (seen.size <= BINS_MAX) seen.add(value);
    }
    const few = seen.size <= 12 ? [...seen].sort((a, b) => a - b) : null;
    const width = few || !(high > low) ? 0 : (high - low) / BINS_MAX;
    const places = new Uint8Array(table.n).fill(255);
    for (let row = 0; row < table.n; row++) {
      const value = values[row];
      if (value !== value) continue;
      places[row] = few ? few.indexOf(value) : Math.min(BINS_MAX - 1, Math.floor((value - low) / width));
    }
    const count = few ? few.length : BINS_MAX;
    this.bins = { metric, few, low, high, width, places, count: seen.size ? count : 0 };
    return this.bins;
  }

  // Sessions by bin, and their mean.
  metricAt(metric, seq, partition) {
    const bins = this.binsOf(metric), table = this.tables.attempts, rows = table.upto(seq);
    const group = table.of("group"), inPartition = this.tables.groups.of("partition");
    const values = table.of(`metric ${metric}`), counts = new Float64Array(bins.count), places = bins.places;
    let sum = 0, count = 0;
    for (let row = 0; row < rows; row++) {
      if (places[row] === 255 || (partition >= 0 && inPartition[group[row]] !== partition)) continue;
      counts[places[row]] += 1;
      sum += values[row];
      count += 1;
    }
    return { bins, counts, count, mean: sum / count };
  }

  // Seconds that sample() calls had waited in all, up to an event.
  waited(seq, partition) {
    const table = this.tables.batches, rows = table.upto(seq);
    const from = table.of("requested"), seqs = table.of("seq"), which = table.of("partition");
    let seconds = 0;
    for (let row = 0; row < rows; row++) {
      if (partition < 0 || which[row] === partition) seconds += this.timeOf(seqs[row]) - this.timeOf(from[row]);
    }
    return seconds;
  }

  tokensAt(seq) {
    const table = this.tables.attempts;
    if (this.tokenSums?.length !== table.n + 1) {
      this.tokenSums = new Float64Array(table.n + 1);
      const tokens = table.of("tokens");
      for (let row = 0; row < table.n; row++) this.tokenSums[row + 1] = this.tokenSums[row] + tokens[row];
    }
    return this.tokenSums[table.upto(seq)];
  }

  // Search -----------------------------------------------------------------------------------------------

  // Per group, in lower case: its id, prompt, dataset, and what its attempts and its eviction said.
  haystack() {
    if (this.haystacks.length === this.n) return this.haystacks;
    const dataset = this.tables.groups.of("dataset"), names = this.meta.datasets;
    const found = this.ids.map((id, at) => `${id}\n${this.prompts[at] ?? ""}\n${names[dataset[at]]}`);
    for (const table of [this.tables.attempts, this.tables.evictions, this.tables.requeues]) {
      const group = table.of("group"), message = table.of("message");
      for (let row = 0; row < table.n; row++) {
        if (message[row]) found[group[row]] += `\n${this.texts[message[row]]}`;
      }
    }
    this.haystacks = found.map((text) => text.toLowerCase());
    return this.haystacks;
  }
}
