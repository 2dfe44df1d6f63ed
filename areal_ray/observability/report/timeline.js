// What every actor did when: one lane an actor, on a canvas. The wheel zooms, dragging moves.

const ACTIVITIES = [
  { name: "busy", paint: "--busy", about: "generates, or computes a step" },
  { name: "waiting for data", paint: "--data", about: "an engine without a request; a trainer without a batch" },
  { name: "waiting for weights", paint: "--weights", about: "an engine that has none yet; a trainer that sends them" },
  { name: "paused", paint: "--paused", about: "stands still while weights are swapped" },
  { name: "resting", paint: "--resting", about: "while the others have the devices" },
  { name: "saving", paint: "--saving", about: "copies for a checkpoint, or exports" },
  { name: "restarting", paint: "--restarting", about: "a new process comes up" },
  { name: "idle", paint: "--idle", about: "none of these" },
];
const ABSENT = { name: "not there", paint: "--absent", about: "nobody heard of it: lost, restarting, or not begun" };
const FULL = 65535;
const LABELS = 104;
const AXIS = 46;

function decodedShares(text) {
  const raw = atob(text);
  const shares = new Uint16Array(raw.length / 2);
  for (let nth = 0; nth < shares.length; nth++) {
    shares[nth] = raw.charCodeAt(2 * nth) | (raw.charCodeAt(2 * nth + 1) << 8);
  }
  return shares;
}

class Timeline {
  constructor() {
    this.canvas = element("canvas", {
      id: "timeline", tabindex: "0", role: "img",
      "aria-label": "What every actor did when. Plus and minus zoom, arrows move, 0 shows all.",
    });
    this.shown = element("output", { class: "window" });
    this.node = element("div", { class: "timeline" },
      element("div", { class: "tools" },
        this.shown,
        element("span", { class: "hint" }, "wheel zooms · drag moves · double click shows all"),
        this.button("−", "Zoom out", () => this.zoom(2)),
        this.button("+", "Zoom in", () => this.zoom(0.5)),
        this.button("All", "Show all", () => this.show(this.begin, this.end))),
      this.canvas);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.node);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  button(text, title, act) {
    return element("button", { type: "button", title, "aria-label": title, onclick: act }, text);
  }

  update({ timeline, step_t: stepTimes, curves }) {
    const last = { begin: this.begin, end: this.end, from: this.from, to: this.to };
    this.data = timeline;
    this.lanes = timeline.lanes.map((lane) => ({
      who: lane.who,
      parts: ACTIVITIES.filter(({ name }) => lane.shares[name]).map((activity) => ({
        ...activity, shares: decodedShares(lane.shares[activity.name]),
      })),
    }));
    this.stepsEach = curves.width;
    this.steps = curves.steps.map((step, nth) => ({ step, t: stepTimes[nth] }))
      .filter(({ t }) => t !== null);
    this.begin = timeline.began_t;
    const span = timeline.spans[timeline.spans.length - 1];
    this.end = Math.max(this.begin + 1, span ? span.t + span.ended_at - span.began_at : 1);
    // Who sees all, or the end, goes on seeing it; who looks at a part keeps it.
    if (last.from === undefined || (last.from <= last.begin && last.to >= last.end)) {
      this.show(this.begin, this.end);
    } else if (last.to >= last.end) {
      this.show(this.end - (last.to - last.from), this.end);
    } else {
      this.show(last.from, last.to);
    }
  }

  listen() {
    const { canvas } = this;
    let grabbed = null;
    canvas.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      const sees = this.to - this.from;
      // At the widest the wheel scrolls the page again, so nobody is caught here.
      if (!sideways && event.deltaY > 0 && sees >= this.end - this.begin) return;
      event.preventDefault();
      if (sideways) this.move(((event.deltaX || event.deltaY) / this.inner()) * sees);
      else this.zoom(1.0015 ** Math.max(-400, Math.min(400, event.deltaY)), this.time(event.offsetX));
      this.hover(event);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      grabbed = { x: event.offsetX, from: this.from, to: this.to };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!grabbed) return this.hover(event);
      const by = ((grabbed.x - event.offsetX) / this.inner()) * (grabbed.to - grabbed.from);
      tip.hide();
      return this.show(grabbed.from + by, grabbed.to + by);
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (grabbed = null));
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("dblclick", () => this.show(this.begin, this.end));
    canvas.addEventListener("keydown", (event) => {
      const by = 0.2 * (this.to - this.from);
      const act = {
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
        ArrowLeft: () => this.move(-by), ArrowRight: () => this.move(by),
        0: () => this.show(this.begin, this.end),
      }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    });
  }

  inner() {
    return Math.max(1, this.canvas.clientWidth - LABELS);
  }

  time(x) {
    return this.from + ((x - LABELS) / this.inner()) * (this.to - this.from);
  }

  x(t) {
    return LABELS + ((t - this.from) / (this.to - this.from)) * this.inner();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const narrowest = Math.min(2, this.end - this.begin);
    const wanted = Math.max(narrowest, (this.to - this.from) * factor);
    const kept = wanted / (this.to - this.from);
    this.show(around - (around - this.from) * kept, around + (this.to - around) * kept);
  }

  move(by) {
    this.show(this.from + by, this.to + by);
  }

  show(from, to) {
    const length = Math.min(to - from, this.end - this.begin);
    this.from = Math.min(Math.max(from, this.begin), this.end - length);
    this.to = this.from + length;
    this.canvas.dataset.from = this.from.toFixed(3);
    this.canvas.dataset.to = this.to.toFixed(3);
    this.shown.textContent =
      `${clock(this.from)} to ${clock(this.to)} · ${duration(this.to - this.from)}`;
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.data) return;
    const many = this.lanes.length;
    this.laneHeight = many <= 8 ? 34 : many <= 24 ? 22 : 14;
    this.gap = many <= 24 ? 6 : 3;
    const height = AXIS + many * (this.laneHeight + this.gap) + 4;
    const dense = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    const pen = this.canvas.getContext("2d");
    pen.scale(dense, dense);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    this.pen = pen;
    this.drawAxis(width, height);
    this.lanes.forEach((lane, nth) => this.drawLane(lane, this.top(nth)));
    this.drawEvents(height);
    this.drawBreaks(height);
    pen.fillStyle = colour("--ink");
    pen.textAlign = "left";
    this.lanes.forEach((lane, nth) =>
      pen.fillText(lane.who, 0, this.top(nth) + this.laneHeight / 2 + 4, LABELS - 10));
  }

  top(nth) {
    return AXIS + nth * (this.laneHeight + this.gap);
  }

  drawAxis(width, height) {
    const { pen } = this;
    const { step, values } = clockTicks(this.from, this.to, this.inner() / 120);
    pen.textAlign = "center";
    for (const t of values) {
      const x = this.x(t);
      pen.fillStyle = colour("--rule");
      pen.fillRect(x, 16, 1, height - 20);
      pen.fillStyle = colour("--soft");
      if (x > LABELS + 12 && x < width - 16) pen.fillText(clock(t, step), x, 11);
    }
    pen.textAlign = "left";
    pen.fillStyle = colour("--soft");
    pen.fillText("steps", 0, 31);
    this.drawSteps();
  }

  drawSteps() {
    const { pen } = this;
    const there = this.steps.filter(({ t }) => t >= this.from && t <= this.to);
    if (!there.length) return;
    const widest = pen.measureText(grouped.format(there[there.length - 1].step)).width + 18;
    const labels = Math.max(1, Math.floor(this.inner() / widest));
    const rough = there.length / labels;
    const power = 10 ** Math.max(0, Math.floor(Math.log10(rough)));
    const every = [1, 2, 5, 10].find((one) => one * power >= rough) * power * this.stepsEach;
    let last = -Infinity;
    pen.textAlign = "center";
    pen.fillStyle = colour("--soft");
    for (const { step, t } of there) {
      const x = this.x(t);
      if (x - last >= 2) {
        pen.fillRect(x, 36, 1, 4);
        last = x;
      }
      const label = grouped.format(step);
      const half = pen.measureText(label).width / 2;
      if (step % every || x - half < LABELS || x + half > LABELS + this.inner()) continue;
      pen.fillRect(x, 34, 1, 6);
      pen.fillText(label, x, 31);
    }
  }

  drawLane(lane, top) {
    const { pen, laneHeight } = this;
    const { began_t: began, width_s: width, bins } = this.data;
    const left = Math.max(LABELS, this.x(this.begin));
    const right = Math.min(LABELS + this.inner(), this.x(this.end));
    pen.fillStyle = this.hatch();
    pen.fillRect(left, top, right - left, laneHeight);
    const perPixel = (this.to - this.from) / this.inner() / width;
    const first = Math.max(0, Math.floor((this.from - began) / width));
    const last = Math.min(bins, Math.ceil((this.to - began) / width));
    const paints = lane.parts.map(({ paint }) => colour(paint));
    const stride = Math.max(1, Math.floor(perPixel));
    for (let bin = first - (first % stride); bin < last; bin += stride) {
      const from = Math.max(left, this.whole(this.x(began + bin * width)));
      const to = Math.min(right, this.whole(this.x(began + (bin + stride) * width)));
      let bottom = top + laneHeight;
      lane.parts.forEach(({ shares }, part) => {
        let share = 0;
        for (let one = bin; one < Math.min(bin + stride, bins); one++) share += shares[one];
        const tall = (share / stride / FULL) * laneHeight;
        if (!tall) return;
        pen.fillStyle = paints[part];
        pen.fillRect(from, bottom - tall, to - from, tall);
        bottom -= tall;
      });
    }
  }

  // To the border of a pixel, or the seams between columns shine through.
  whole(x) {
    const dense = devicePixelRatio || 1;
    return Math.round(x * dense) / dense;
  }

  hatch() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour("--absent-ground");
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = colour("--absent");
    pen.beginPath();
    pen.moveTo(-1, 7);
    pen.lineTo(7, -1);
    pen.stroke();
    return this.pen.createPattern(tile, "repeat");
  }

  drawEvents(height) {
    const { pen } = this;
    const graver = ["info", "warning", "error"];
    const events = [...this.data.events];
    events.sort((one, other) => graver.indexOf(one.level) - graver.indexOf(other.level));
    for (const event of events) {
      const x = this.x(event.t);
      if (x < LABELS || x > LABELS + this.inner()) continue;
      const paint = colour(`--${event.level}`);
      const nth = this.lanes.findIndex(({ who }) => who === event.who);
      if (event.level !== "info") {
        pen.fillStyle = paint;
        pen.globalAlpha = 0.45;
        pen.fillRect(x - 0.5, AXIS - 4, 1, height - AXIS);
        pen.globalAlpha = 1;
      }
      this.diamond(x, nth < 0 ? AXIS - 4 : this.top(nth), event.level === "info" ? 3.5 : 5, paint);
    }
  }

  diamond(x, y, size, paint) {
    const { pen } = this;
    pen.beginPath();
    pen.moveTo(x, y - size);
    pen.lineTo(x + size, y);
    pen.lineTo(x, y + size);
    pen.lineTo(x - size, y);
    pen.closePath();
    pen.fillStyle = paint;
    pen.strokeStyle = colour("--ground");
    pen.lineWidth = 1.5;
    pen.fill();
    pen.stroke();
  }

  drawBreaks(height) {
    const { pen } = this;
    this.data.spans.slice(1).forEach((span, nth) => {
      const x = this.x(span.t);
      if (x < LABELS || x > LABELS + this.inner()) return;
      pen.fillStyle = colour("--ground");
      pen.fillRect(x - 2.5, AXIS - 6, 5, height - AXIS + 2);
      pen.fillStyle = colour("--ink");
      pen.textAlign = "center";
      pen.fillText(`⋯ ${duration(span.began_at - this.data.spans[nth].ended_at)} ⋯`, x, AXIS - 16 + 12);
    });
  }

  at(t) {
    const span = this.data.spans.filter((one) => one.t <= t + 1e-6).pop() || this.data.spans[0];
    return span ? span.began_at + t - span.t : 0;
  }

  hover(event) {
    const nth = Math.floor((event.offsetY - AXIS) / (this.laneHeight + this.gap));
    const t = this.time(event.offsetX);
    if (event.offsetX < LABELS || t < this.begin || t > this.end) return tip.hide();
    const near = this.data.events.filter((one) => Math.abs(this.x(one.t) - event.offsetX) < 6);
    const happened = near.slice(0, 6).map((one) =>
      element("p", { class: `event ${one.level}` }, element("b", {}, one.who), ` ${one.text.slice(0, 240)}`));
    const lane = this.lanes[nth];
    const title = `${lane ? `${lane.who} · ` : ""}${clock(t, 0.1)} · ${timeOfDay(this.at(t))}`;
    const rows = lane ? this.sharesAt(lane, t) : [];
    const step = this.stepAt(t);
    if (step) rows.push({ name: "step", value: grouped.format(step) });
    return tip.show(event, ...tipRows(title, rows), ...happened);
  }

  sharesAt(lane, t) {
    const { began_t: began, width_s: width, bins } = this.data;
    const stride = Math.max(1, Math.floor((this.to - this.from) / this.inner() / width));
    const bin = Math.floor((t - began) / width / stride) * stride;
    const rows = [];
    let left = 1;
    for (const { name, paint, shares } of lane.parts) {
      let share = 0;
      for (let one = bin; one < Math.min(bin + stride, bins); one++) share += shares[one];
      share /= stride * FULL;
      left -= share;
      if (share > 0.0005) rows.push({ name, paint, value: percent(share) });
    }
    if (left > 0.01) rows.push({ name: ABSENT.name, paint: ABSENT.paint, value: percent(left) });
    return rows;
  }

  stepAt(t) {
    const next = this.steps.find((one) => one.t >= t);
    return next ? next.step : null;
  }
}
