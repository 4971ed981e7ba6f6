// Words, numbers and elements. Whatever comes out of a log is set as text, never as markup.

const PHASE_WORDS = {
  pending: "submitted; no session has begun",
  running: "sessions are generating",
  finished: "all sessions it needs have ended well; waits to be sampled",
  failure: "ended, and sessions failed",
  sampled: "in a batch that is with the trainer",
  evicted: "thrown away untrained",
  committed: "trained on, or ended as validation; done with",
};
// From the bottom of the stack to its top. Colours are those of Okabe and Ito, told apart by everybody.
const STACK = [SAMPLED, FAILURE, FINISHED, RUNNING, PENDING, COMMITTED, EVICTED];
const PHASE_COLOURS = ["#999999", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#cc79a7", "#0072b2"];
const OUTCOME_COLOURS = {
  finished: "#009e73", error: "#d55e00", timeout: "#e69f00", cancelled: "#999999", lost: "#cc79a7",
  empty: "#f0e442", refused: "#a0522d", spare: "#b8c4cc", requeued: "#7d6b91", open: "#56b4e9",
};
const REASON_WORDS = {
  stale: "too many weight versions old",
  zero_variance: "all answers worth the same: nothing to learn",
  failed: "sessions failed",
  empty: "no answer at all",
  too_few: "too few sessions finished",
  cancelled: "given up",
  damaged: "its data can't be read",
  surplus: "the batch was full without it",
  custom: "dropped by a rule of the run's own",
};

const $ = (id) => document.getElementById(id);

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (value) => whole.format(value);
const counted = (value, thing, things) => `${count(value)} ${value === 1 ? thing : things ?? thing + "s"}`;
const brief = (value) => (Math.abs(value) < 10000 ? count(value) : short.format(value));
const number = (value) => (Number.isFinite(value) ? String(parseFloat(value.toPrecision(4))) : "");
const percent = (part, all) => (all > 0 ? `${((100 * part) / all).toFixed(part && part / all < 0.1 ? 1 : 0)} %` : "");

// A length of time.
function span(seconds) {
  if (!(seconds >= 0)) return "";
  if (seconds === 0) return "0 s";
  if (seconds < 0.0995) return `${parseFloat((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 59.95) return `${seconds < 9.95 ? seconds.toFixed(2) : seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes} min ${rest} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// A place on a clock that began at the page's beginning.
function clock(seconds, fine = false) {
  const sign = seconds < 0 ? "-" : "", all = Math.abs(seconds);
  const hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60, rest = all % 60;
  const two = (value) => String(value).padStart(2, "0");
  const last = fine ? rest.toFixed(3).padStart(6, "0") : two(Math.floor(rest + 1e-9));
  return `${sign}${hours}:${two(minutes)}:${last}`;
}

function moment(ms) {
  const date = new Date(ms);
  return Number.isFinite(date.getTime()) ? date.toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC") : "";
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The one tooltip of the page, at a place in the window.
const tip = {
  show(x, y, lines) {
    const node = $("tip");
    node.replaceChildren(...lines.map((line) => (typeof line === "string" ? el("div", {}, line) : line)));
    node.hidden = false;
    const box = node.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
    node.style.left = `${Math.max(8, left)}px`;
    node.style.top = `${Math.max(8, Math.min(y + 14, innerHeight - box.height - 8))}px`;
  },
  hide() { $("tip").hidden = true; },
};

const swatch = (colour) => {
  const node = el("span", { class: "swatch" });
  node.style.background = colour;
  return node;
};
const badge = (phase, name) => el("span", { class: "badge" }, swatch(PHASE_COLOURS[phase]), name);
