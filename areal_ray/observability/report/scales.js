"use strict";

// Elements, numbers and scales: what the rest of the page is made of. Text that users or models
// wrote only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return trimmed(value / 1e9, 2) + " G";
  if (size >= 1e6) return trimmed(value / 1e6, 2) + " M";
  if (size >= 1e4) return grouped.format(value);
  if (size >= 1000) return grouped.format(Math.round(value));
  if (size >= 100) return trimmed(value, 0);
  if (size >= 10) return trimmed(value, 1);
  if (size >= 1) return trimmed(value, 2);
  if (size >= 0.001 || size === 0) return trimmed(value, 3);
  return value.toExponential(1).replace(".0e", "e");
}

function trimmed(value, digits) {
  const text = value.toFixed(digits);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function reward(value) {
  return value === null || value === undefined ? "–" : value.toFixed(3);
}

function percent(share) {
  if (share === 0) return "0 %";
  if (share < 0.001) return "< 0.1 %";
  return (100 * share).toFixed(share >= 0.0995 ? 0 : 1) + " %";
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 0.9995) return number(value * 1000) + " ms";
  return value < 120 ? number(value) + " s" : clock(value);
}

// 1:05:09, or 5:09; with a tenth where `step`, how far apart values are, is a part of a second, and
// as 1 d 6 h where it is hours.
function clock(value, step = 1) {
  if (step >= 3600) return duration(value);
  const tenths = step < 1;
  const all = tenths ? Math.round(value * 10) / 10 : Math.round(value);
  const sign = all < 0 ? "−" : "";
  const rest = Math.abs(all);
  const days = Math.floor(rest / 86400);
  const hours = Math.floor((rest % 86400) / 3600);
  const minutes = Math.floor((rest % 3600) / 60);
  const last = (rest % 60).toFixed(tenths ? 1 : 0).padStart(tenths ? 4 : 2, "0");
  const small = `${hours || days ? String(minutes).padStart(2, "0") : minutes}:${last}`;
  return sign + (days ? `${days} d ` : "") + (hours || days ? `${hours}:` : "") + small;
}

const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

// The two largest units: 3 d 4 h, 2 h 5 min, 12 min 30 s, 45 s.
function duration(value) {
  for (const [unit, name, part, smaller] of UNITS) {
    const parts = Math.round(value / part);
    const each = unit / part;
    if (parts < each) continue;
    const rest = parts % each;
    return `${Math.floor(parts / each)} ${name}${rest ? ` ${rest} ${smaller}` : ""}`;
  }
  return `${Math.round(value)} s`;
}

const DAY = new Intl.DateTimeFormat("en-GB", {
  day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit",
});
const TIME = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit", minute: "2-digit", second: "2-digit",
});

function moment(at) {
  return DAY.format(new Date(at * 1000));
}

function timeOfDay(at) {
  return TIME.format(new Date(at * 1000));
}

// Round values that divide [low, high] into about `count` parts.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough * 0.75) * power;
  return spaced(low, high, step);
}

function spaced(low, high, step) {
  const found = [];
  for (let nth = Math.ceil(low / step - 1e-9); nth * step <= high + step * 1e-9; nth++) {
    found.push(Number((nth * step).toPrecision(12)));
  }
  return found;
}

const CLOCK_STEPS = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
  3600, 7200, 14400, 21600, 43200, 86400, 172800,
];

function clockTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const step = CLOCK_STEPS.find((one) => one >= rough) || 604800;
  return { step, values: spaced(low, high, step) };
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    found.push(10 ** power);
  }
  return found.filter((one) => one >= low * 0.999 && one <= high * 1.001);
}

// The index of the value that is nearest, in a sorted list.
function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle;
    else high = middle;
  }
  return Math.abs(values[high] - wanted) < Math.abs(values[low] - wanted) ? high : low;
}

const tip = {
  show(event, ...content) {
    const box = document.getElementById("tip");
    box.replaceChildren(...content);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const right = event.clientX + 16 + width > innerWidth - 8;
    const left = right ? event.clientX - width - 16 : event.clientX + 16;
    const top = Math.min(event.clientY + 14, innerHeight - height - 8);
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

function tipRows(title, rows) {
  const body = rows.map(({ name, value, paint }) =>
    element("tr", {},
      element("td", {}, paint ? swatch(paint) : "", name),
      element("td", { class: "value" }, value)));
  return [element("strong", {}, title), element("table", {}, ...body)];
}

function swatch(paint) {
  const box = element("i", { class: "swatch" });
  box.style.background = paint.startsWith("--") ? `var(${paint})` : paint;
  return box;
}
