// The head of the page, and where the time went. Every section has `node` and `update(data)`.

const LISTED = 12;

function section(id, title, lead, ...children) {
  const heading = element("h2", { id: `${id}-title` }, title);
  const said = lead ? element("p", { class: "lead" }, lead) : null;
  return element("section", { id, "aria-labelledby": `${id}-title` }, heading, said, ...children);
}

function notice(text) {
  return element("p", { class: "notice" }, text);
}

function counted(count, name) {
  return `${grouped.format(count)} ${name}${count === 1 ? "" : "s"}`;
}

function tableHead(...names) {
  const cells = names.map((name) => element("th", { scope: "col" }, name));
  return element("thead", {}, element("tr", {}, ...cells));
}

class Head {
  constructor(live) {
    this.live = live;
    this.node = document.getElementById("head");
  }

  update(data) {
    const { summary } = data;
    const share = summary.steps && !summary.ended ? Math.min(1, summary.step / summary.steps) : null;
    const bar = element("div", { class: "progress" }, element("i"));
    bar.firstChild.style.width = `${100 * (share || 0)}%`;
    this.node.replaceChildren(element("div", { class: "wide" },
      element("div", { class: "title" },
        element("p", { class: "brand" }, "areal_ray"),
        element("h1", {}, summary.name),
        element("p", { class: "far" }, howFar(summary, share))),
      this.status(data),
      share === null ? null : bar,
      element("dl", { class: "tiles" }, ...tiles(data))));
  }

  status(data) {
    if (!this.live) return element("p", { class: "status" }, `written ${moment(data.made_at)}`);
    return element("p", { class: "status live" }, element("i"), this.live.text());
  }
}

function howFar({ step, steps, version, ended }, share) {
  const parts = [`step ${grouped.format(step)}`];
  if (ended) parts.unshift(ended);
  if (share !== null) parts[0] += ` of ${grouped.format(steps)}`;
  if (share !== null) parts.push(percent(share));
  if (version !== null) parts.push(`version ${grouped.format(version)}`);
  return parts.join(" · ");
}

function tiles({ summary, evaluations, timeline }) {
  const errors = timeline.counts.error || 0;
  const warnings = counted(timeline.counts.warning || 0, "warning");
  const pace = summary.seconds ? summary.generated_tokens / summary.seconds : 0;
  return [
    tile("Last reward", [reward(summary.reward)], "mean of the last step's samples"),
    heldOut(evaluations),
    tile("Duration", [duration(summary.seconds)], timeLeft(summary)),
    tile("Tokens", [number(summary.generated_tokens)], `generated, ${number(pace)} a second`),
    tile("Failures", [grouped.format(errors)],
      `${warnings}, ${counted(summary.groups_failed, "group")} failed`, errors ? "bad" : ""),
  ];
}

function heldOut({ first, last }) {
  if (!first) return tile("Held out", ["–"], "no evaluation yet");
  const prompts = counted(last.prompts, "prompt");
  if (first.step === last.step) {
    return tile("Held out", [reward(first.reward)], `step ${first.step}, ${prompts}`);
  }
  const arrow = element("span", { class: "arrow" }, " → ");
  return tile("Held out", [reward(first.reward), arrow, reward(last.reward)],
    `step ${first.step} to ${last.step}, ${prompts}`);
}

function timeLeft({ step, steps, seconds: spent, ended }) {
  if (!step || !(steps > step) || ended) return "of training";
  return `about ${duration((spent / step) * (steps - step))} to go`;
}

function tile(name, value, note, kind = "") {
  return element("div", { class: `tile ${kind}` },
    element("dt", {}, name), element("dd", {}, ...value), element("dd", { class: "note" }, note));
}

class TimeSection {
  constructor() {
    this.timeline = new Timeline();
    this.bars = element("div", { class: "bars" });
    this.legend = element("ul", { class: "legend activities" });
    this.none = notice("This run has no timeline.jsonl: its telemetry was off "
      + "(observability.telemetry), or it has not begun.");
    this.body = element("div", {}, this.legend, this.timeline.node,
      element("h3", {}, "Shares of the whole run"), this.bars);
    this.node = section("time", "Where the time went",
      "One lane an actor; the height of a colour is its share of that moment.",
      this.none, this.body);
    this.showsAll = false;
  }

  update(data) {
    const { lanes } = data.timeline;
    this.none.hidden = lanes.length > 0;
    this.body.hidden = lanes.length === 0;
    if (!lanes.length) return;
    const seen = ACTIVITIES.filter(({ name }) => lanes.some((lane) => lane.seconds[name]));
    this.legend.replaceChildren(...[...seen, ABSENT].map((activity) =>
      element("li", { title: activity.about }, activitySwatch(activity), activity.name)));
    this.timeline.update(data);
    this.drawBars(lanes);
  }

  drawBars(lanes) {
    const engines = lanes.filter(({ who }) => who.startsWith("engine"));
    const rows = lanes.slice(0, this.showsAll ? lanes.length : LISTED).map(shareBar);
    if (engines.length > 1) rows.unshift(shareBar(together(engines)));
    if (lanes.length > LISTED) {
      const toggle = () => {
        this.showsAll = !this.showsAll;
        this.drawBars(lanes);
      };
      rows.push(element("button", { type: "button", class: "more", onclick: toggle },
        this.showsAll ? "Show fewer" : `Show all ${lanes.length}`));
    }
    this.bars.replaceChildren(...rows);
  }
}

function activitySwatch({ name, paint }) {
  return name === ABSENT.name ? element("i", { class: "swatch absent" }) : swatch(paint);
}

function together(lanes) {
  const all = { who: `all ${lanes.length} engines`, seconds: {}, absent_s: 0, tokens: 0 };
  for (const lane of lanes) {
    for (const [name, value] of Object.entries(lane.seconds)) {
      all.seconds[name] = (all.seconds[name] || 0) + value;
    }
    all.absent_s += lane.absent_s;
    all.tokens += lane.tokens;
  }
  return all;
}

function shareBar(lane) {
  const parts = ACTIVITIES.map((one) => ({ ...one, seconds: lane.seconds[one.name] || 0 }));
  parts.push({ ...ABSENT, seconds: lane.absent_s });
  const total = parts.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const there = parts.filter((one) => one.seconds / total > 0.0005);
  const bar = element("div", { class: "bar" }, ...there.map((one) => {
    const piece = element("i", { class: one.name === ABSENT.name ? "absent" : "" });
    piece.style.flexGrow = one.seconds / total;
    if (one.name !== ABSENT.name) piece.style.background = `var(${one.paint})`;
    return piece;
  }));
  const rows = there.map((one) => ({
    name: one.name,
    paint: one.paint,
    value: `${percent(one.seconds / total)} · ${seconds(one.seconds)}`,
  }));
  if (lane.tokens) rows.push({ name: "tokens", value: number(lane.tokens) });
  bar.addEventListener("pointermove", (event) => tip.show(event, ...tipRows(lane.who, rows)));
  bar.addEventListener("pointerleave", () => tip.hide());
  return element("div", { class: "share" },
    element("span", { class: "who", title: lane.who }, lane.who), bar,
    element("span", { class: "value" }, `${percent((lane.seconds.busy || 0) / total)} busy`));
}
