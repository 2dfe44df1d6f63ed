// Curves over steps, as SVG. All charts point at the same step.

const MARGIN = { left: 52, right: 14, top: 10, bottom: 24 };
const charts = new Set();

class Chart {
  // about: title, height, unit, from, log, stacked, bridged, series(data), marks(data), note(data)
  // a series: name, paint, steps, values, low, high, dots, thin, unnamed
  constructor(about) {
    this.about = about;
    this.legend = element("ul", { class: "legend" });
    this.note = element("p", { class: "note" });
    this.svg = drawn("svg", { role: "img", "aria-label": about.title });
    this.node = element("figure", { class: "chart" },
      element("figcaption", {}, element("h3", {}, about.title), this.legend),
      this.svg, this.note);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      tip.hide();
      for (const chart of charts) chart.rule(null);
    });
    new ResizeObserver(() => this.draw()).observe(this.node);
    charts.add(this);
  }

  update(data) {
    this.width = data.curves.width;
    this.series = this.about.series(data).filter(
      (one) => one.values && one.values.some((value) => value !== null));
    this.marks = this.about.marks ? this.about.marks(data) : [];
    this.note.textContent = this.about.note ? this.about.note(data) : "";
    this.node.hidden = this.series.length === 0;
    this.legend.replaceChildren(...this.series.filter((one) => !one.unnamed).map((one) =>
      element("li", {}, swatch(one.paint), one.name)));
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || !this.series?.length) return;
    this.height = this.about.height || 210;
    this.svg.setAttribute("height", this.height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.scale(width);
    this.pointer = drawn("g", { class: "pointer" });
    const layers = this.about.stacked ? this.areas() : this.curves();
    this.svg.replaceChildren(this.axes(width), ...layers, ...this.marked(), this.pointer);
  }

  scale(width) {
    const steps = this.series.flatMap((one) => [one.steps[0], one.steps[one.steps.length - 1]]);
    let first = Math.min(...steps);
    let last = Math.max(...steps);
    if (first === last) {
      first -= 1;
      last += 1;
    }
    const inner = width - MARGIN.left - MARGIN.right;
    this.first = first;
    this.last = last;
    this.x = (step) => MARGIN.left + ((step - first) / (last - first)) * inner;
    this.step = (x) => first + ((x - MARGIN.left) / inner) * (last - first);
    const [low, high] = this.about.stacked ? [0, 1] : this.extent();
    this.low = low;
    this.high = high;
    const bottom = this.height - MARGIN.bottom;
    const tall = bottom - MARGIN.top;
    if (this.about.log) {
      const span = Math.log(high / low);
      this.y = (value) => bottom - (Math.log(Math.max(value, low) / low) / span) * tall;
    } else {
      this.y = (value) => bottom - ((value - low) / (high - low)) * tall;
    }
  }

  extent() {
    let low = Infinity;
    let high = -Infinity;
    for (const one of this.series) {
      for (const list of [one.values, one.low, one.high]) {
        for (const value of list || []) {
          if (value === null || (this.about.log && value <= 0)) continue;
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
    }
    if (low > high) [low, high] = [0, 1];
    if (this.about.log) {
      return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 0.05)];
    }
    if (this.about.from !== undefined) low = Math.min(this.about.from, low);
    if (low === high) {
      const around = Math.abs(low) * 0.1;
      [low, high] = low === 0 ? [0, 1] : [low - around, high + around];
    }
    const room = (high - low) * 0.06;
    return [low === this.about.from ? low : low - room, high + room];
  }

  axes(width) {
    const group = drawn("g", { class: "axes" });
    const values = this.about.log
      ? logTicks(this.low, this.high)
      : ticks(this.low, this.high, this.height > 160 ? 4 : 3);
    for (const value of values) {
      const y = this.y(value);
      group.append(
        drawn("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }),
        drawn("text", { class: "y", x: MARGIN.left - 8, y: y + 4 }, this.shown(value)));
    }
    const bottom = this.height - 6;
    group.append(drawn("text", { class: "y", x: MARGIN.left - 16, y: bottom }, "step"));
    for (const step of ticks(this.first, this.last, Math.max(2, width / 110))) {
      if (!Number.isInteger(step)) continue;
      group.append(drawn("text", { class: "x", x: this.x(step), y: bottom }, grouped.format(step)));
    }
    return group;
  }

  shown(value) {
    if (this.about.stacked) return percent(value);
    return this.about.unit === "s" ? seconds(value) : number(value);
  }

  curves() {
    const layers = [];
    for (const one of this.series) {
      const paint = `var(${one.paint})`;
      if (one.low?.length) {
        layers.push(drawn("path", { class: "band", fill: paint, d: this.band(one) }));
      }
      const line = drawn("path", { class: one.thin ? "line thin" : "line", stroke: paint });
      line.setAttribute("d", this.path(one.steps, one.values));
      layers.push(line);
      if (one.dots || one.values.filter((value) => value !== null).length === 1) {
        const dots = one.steps.length > 120 ? [] : one.steps;
        dots.forEach((step, nth) => {
          if (one.values[nth] === null) return;
          layers.push(drawn("circle", {
            class: "dot", cx: this.x(step), cy: this.y(one.values[nth]), r: 3.5, fill: paint,
          }));
        });
      }
    }
    return layers;
  }

  path(steps, values) {
    let path = "";
    let pen = "M";
    for (let nth = 0; nth < steps.length; nth++) {
      if (values[nth] === null) {
        if (!this.about.bridged) pen = "M";
        continue;
      }
      path += `${pen}${this.x(steps[nth]).toFixed(1)},${this.y(values[nth]).toFixed(1)}`;
      pen = "L";
    }
    return path;
  }

  band({ steps, low, high }) {
    const there = steps.map((_, nth) => nth).filter((nth) => low[nth] !== null);
    const at = (nth, value) => `${this.x(steps[nth]).toFixed(1)},${this.y(value).toFixed(1)}`;
    const up = there.map((nth) => at(nth, high[nth]));
    const down = there.reverse().map((nth) => at(nth, low[nth]));
    return up.length ? `M${[...up, ...down].join("L")}Z` : "";
  }

  // Shares of a whole at each step, one above the other.
  areas() {
    const steps = this.series[0].steps;
    const totals = steps.map((_, nth) =>
      this.series.reduce((sum, one) => sum + (one.values[nth] || 0), 0));
    const there = steps.map((_, nth) => nth).filter((nth) => totals[nth] > 0);
    const below = steps.map(() => 0);
    const half = there.length === 1 ? 0.5 : 0;
    return this.series.map((one) => {
      const up = [];
      const down = [];
      for (const nth of there) {
        const above = below[nth] + (one.values[nth] || 0) / totals[nth];
        for (const x of half ? [steps[nth] - half, steps[nth] + half] : [steps[nth]]) {
          up.push(`${this.x(x).toFixed(1)},${this.y(above).toFixed(1)}`);
          down.push(`${this.x(x).toFixed(1)},${this.y(below[nth]).toFixed(1)}`);
        }
        below[nth] = above;
      }
      const path = up.length ? `M${[...up, ...down.reverse()].join("L")}Z` : "";
      return drawn("path", { class: "area", fill: `var(${one.paint})`, d: path });
    });
  }

  marked() {
    const y = this.height - MARGIN.bottom;
    return this.marks.slice(0, 300).map(({ step, text }) => {
      const x = this.x(step);
      const path = `M${x},${y - 7}l4.5,7h-9Z`;
      return drawn("path", { class: "mark", d: path }, drawn("title", {}, text));
    });
  }

  point(event) {
    if (!this.series?.length) return;
    const step = this.step(event.clientX - this.svg.getBoundingClientRect().left);
    const steps = this.series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a)).steps;
    const chosen = steps[nearest(steps, step)];
    for (const chart of charts) chart.rule(chosen);
    const rows = this.series.map((one) => this.told(one, chosen)).filter(Boolean);
    const first = Math.max(1, chosen - this.width + 1);
    const title = first < chosen
      ? `steps ${grouped.format(first)} to ${grouped.format(chosen)}`
      : `step ${grouped.format(chosen)}`;
    tip.show(event, ...tipRows(title, this.about.stacked ? rows.reverse() : rows));
  }

  told(one, step) {
    // Of what is there at some steps only, the last one so far.
    const nth = one.dots
      ? one.steps.findLastIndex((other) => other <= step)
      : nearest(one.steps, step);
    const value = nth < 0 ? null : one.values[nth];
    if (value === null) return null;
    if (this.about.stacked) {
      const total = this.series.reduce((sum, other) => sum + (other.values[nth] || 0), 0);
      return total ? { name: one.name, paint: one.paint, value: percent(value / total) } : null;
    }
    let text = this.shown(value);
    if (one.high?.length && one.high[nth] !== one.low[nth]) {
      text += ` (${this.shown(one.low[nth])} to ${this.shown(one.high[nth])})`;
    }
    const where = one.dots && one.steps[nth] !== step ? ` at step ${one.steps[nth]}` : "";
    return { name: one.name + where, paint: one.paint, value: text };
  }

  rule(step) {
    if (!this.pointer || !this.series.length) return;
    if (step === null || step < this.first || step > this.last) {
      this.pointer.replaceChildren();
      return;
    }
    const x = this.x(step);
    const bottom = this.height - MARGIN.bottom;
    const parts = [drawn("line", { x1: x, x2: x, y1: MARGIN.top, y2: bottom })];
    if (!this.about.stacked) {
      for (const one of this.series) {
        const nth = nearest(one.steps, step);
        if (one.steps[nth] !== step || one.values[nth] === null) continue;
        const cy = this.y(one.values[nth]);
        parts.push(drawn("circle", { cx: x, cy, r: 3.5, fill: `var(${one.paint})` }));
      }
    }
    this.pointer.replaceChildren(...parts);
  }
}

function sparkline(steps, values, width = 420, height = 26) {
  const known = values.filter((value) => value !== null);
  const high = Math.max(...known, 1e-9);
  const first = steps[0];
  const span = steps[steps.length - 1] - first || 1;
  let pen = "M";
  let path = "";
  values.forEach((value, nth) => {
    if (value === null) return;
    const x = known.length === 1 ? width / 2 : ((steps[nth] - first) / span) * (width - 2) + 1;
    path += `${pen}${x.toFixed(1)},${(height - 2 - (value / high) * (height - 4)).toFixed(1)}`;
    pen = "L";
  });
  const box = { width, height, viewBox: `0 0 ${width} ${height}` };
  return drawn("svg", { class: "spark", "aria-hidden": "true", ...box },
    drawn("path", { class: "line", d: path }));
}
