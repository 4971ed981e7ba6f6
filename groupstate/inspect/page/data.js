// What the page was given: columns of numbers, unpacked and growing.

const ARRAYS = { B: Uint8Array, H: Uint16Array, I: Uint32Array, q: Float64Array, d: Float64Array };
const WIDTHS = { B: 1, H: 2, I: 4, q: 8, d: 8 };

function bytesOfText(encoded) {
  const binary = atob(encoded);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// The header, which is at the end, and per table its columns.
async function unpacked(bytes) {
  const data = await inflated(bytes);
  const end = data.length - 4;
  const length = new DataView(data.buffer).getUint32(end, true);
  const header = JSON.parse(new TextDecoder().decode(data.subarray(end - length, end)));
  const tables = {};
  let at = 0;
  for (const [name, columns] of Object.entries(header.tables)) {
    tables[name] = {};
    for (const [column, code, count, rising] of columns) {
      const width = WIDTHS[code];
      tables[name][column] = columnOf(data.subarray(at, at + count * width), code, count, rising);
      at += count * width;
    }
  }
  return { header, tables };
}

// Bytes come by place: all first ones, all second ones, and so on.
function columnOf(raw, code, count, rising) {
  const width = WIDTHS[code];
  const bytes = new Uint8Array(count * width);
  for (let place = 0; place < width; place++) {
    const from = raw.subarray(place * count, (place + 1) * count);
    for (let row = 0, to = place; row < count; row++, to += width) bytes[to] = from[row];
  }
  let column;
  if (code === "q") {
    const low = new Uint32Array(bytes.buffer), high = new Int32Array(bytes.buffer);
    column = new Float64Array(count);
    for (let row = 0; row < count; row++) column[row] = high[2 * row + 1] * 4294967296 + low[2 * row];
  } else {
    column = new ARRAYS[code](bytes.buffer);
  }
  if (rising) for (let row = 1; row < count; row++) column[row] += column[row - 1];
  return column;
}

// A column that grows at its end. `a` has room for more than the `n` values that count.
class Column {
  constructor(kind) {
    this.kind = kind;
    this.a = new kind(0);
    this.n = 0;
  }

  room(count) {
    if (count <= this.a.length) return;
    const wider = new this.kind(this.n ? Math.max(count, this.a.length * 2) : count);
    wider.set(this.a);
    this.a = wider;
  }

  // Values that are there without being given.
  pad(count) {
    this.room(count);
    this.n = Math.max(this.n, count);
  }

  push(values) {
    this.room(this.n + values.length);
    this.a.set(values, this.n);
    this.n += values.length;
  }
}

class Grown {
  constructor() {
    this.columns = {};
    this.n = 0;
  }

  push(chunk) {
    const before = this.n;
    for (const [name, values] of Object.entries(chunk)) {
      let column = this.columns[name];
      if (!column) {
        column = this.columns[name] = new Column(values.constructor);
        column.pad(before);
        column.a.fill(NaN, 0, before); // rows that came before a metric was known lack it
      }
      column.push(values);
      this.n = column.n;
    }
  }

  // The values; more may stand behind the n-th.
  of(name) {
    const column = this.columns[name];
    return column ? column.a : [];
  }

  // Rows that are there after event seq.
  upto(seq) {
    return upper(this.of("seq"), this.n, seq);
  }
}

// How many of the first n values of a rising column are at most `most`.
function upper(column, n, most) {
  let low = 0, high = n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= most) low = middle + 1; else high = middle;
  }
  return low;
}
