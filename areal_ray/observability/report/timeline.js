// What every actor did when: one lane an actor, on a canvas. The wheel zooms, dragging moves.

const ACTIVITIES = [
  ["busy", "--busy", "generates, or computes a step"],
  ["waiting for data", "--data", "an engine without a request, a trainer without a batch"],
  ["waiting for weights", "--weights", "an engine that has none yet, a trainer that sends them"],
  ["paused", "--paused", "stands still while weights are swapped"],
  ["resting", "--resting", "while the others have the devices"],
  ["saving", "--saving", "copies for a checkpoint, or exports"],
  ["restarting", "--restarting", "a new process comes up"],
  ["idle", "--idle", "none of these"],
].map(([name, paint, about]) => ({ name, paint, about }));
const ABSENT = {
  name: "not there", paint: "--absent", about: "nobody heard of it: lost, restarting, or not begun",
};
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

function clamped(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

// "#rrggbb" as a pixel of an ImageData.
function packed(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
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
      else this.zoom(1.0015 ** clamped(event.deltaY, -400, 400), this.time(event.offsetX));
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
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        grabbed = null;
      });
    }
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

  // However often it is moved between two frames, it is drawn once.
  draw() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.drawNow();
    });
  }

  drawNow() {
    const width = this.canvas.clientWidth;
    if (!width || !this.data) return;
    const many = this.lanes.length;
    this.laneHeight = many <= 8 ? 34 : many <= 24 ? 22 : 14;
    this.gap = many <= 24 ? 6 : 3;
    const breaks = this.data.spans.length > 1 ? 14 : 0;
    const height = AXIS + many * (this.laneHeight + this.gap) + 4 + breaks;
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
    const { step, values } = clockTicks(this.from, this.to, this.inner() / 90);
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

  // By pixels, since 64 lanes would be 200,000 rectangles.
  drawLane(lane, top) {
    const { began_t: began, width_s: width, bins } = this.data;
    const dense = devicePixelRatio || 1;
    const wide = Math.round(this.inner() * dense);
    const tall = Math.round(this.laneHeight * dense);
    const image = this.pen.createImageData(wide, tall);
    const pixels = new Uint32Array(image.data.buffer);
    const paints = lane.parts.map(({ paint }) => packed(colour(paint)));
    const [line, ground] = [packed(colour("--absent")), packed(colour("--absent-ground"))];
    const perPixel = (this.to - this.from) / wide / width;
    const offset = (this.from - began) / width;
    for (let x = 0; x < wide; x++) {
      const first = Math.max(0, Math.floor(offset + x * perPixel));
      const last = Math.min(bins, Math.max(first + 1, Math.floor(offset + (x + 1) * perPixel)));
      let height = 0;
      let y = tall;
      for (let part = 0; part < paints.length; part++) {
        const { shares } = lane.parts[part];
        let share = 0;
        for (let bin = first; bin < last; bin++) share += shares[bin];
        height += (share / (last - first) / FULL) * tall;
        for (const end = tall - Math.round(height); y > end; y--) {
          pixels[(y - 1) * wide + x] = paints[part];
        }
      }
      while (y-- > 0) pixels[y * wide + x] = (x + y) % (6 * dense) < dense ? line : ground;
    }
    this.pen.putImageData(image, Math.round(LABELS * dense), Math.round(top * dense));
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
      pen.fillRect(x - 2.5, AXIS - 6, 5, height - AXIS - 10);
      pen.fillStyle = colour("--ink");
      pen.textAlign = "center";
      const away = span.began_at - this.data.spans[nth].ended_at;
      pen.fillText(`${duration(away)} left out`, x, height - 4);
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
      element("p", { class: `event ${one.level}` },
        element("b", {}, one.who), ` ${one.text.slice(0, 240)}`));
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
