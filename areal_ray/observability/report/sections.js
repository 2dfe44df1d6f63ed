// The sections of the page, each with `node` and `update(data)`.

const LISTED = 12;

function section(id, title, lead, ...children) {
  const node = element("section", { id, "aria-labelledby": `${id}-title` },
    element("h2", { id: `${id}-title` }, title));
  if (lead) node.append(element("p", { class: "lead" }, lead));
  node.append(...children);
  return node;
}

function column(data, name) {
  return data.curves.columns[name] || { mean: [], low: [], high: [] };
}

function curve(data, field, name, paint, more = {}) {
  const { mean, low, high } = column(data, field);
  return { name, paint, steps: data.curves.steps, values: mean, low, high, ...more };
}

// The mean of each point and those before it, over about a fiftieth of the run.
function smoothed(values) {
  const reach = Math.max(3, Math.round(values.length / 50));
  const window = [];
  return values.map((value) => {
    if (value === null) return null;
    window.push(value);
    if (window.length > reach) window.shift();
    return window.reduce((sum, one) => sum + one, 0) / window.length;
  });
}

class Head {
  constructor(live) {
    this.live = live;
    this.node = document.getElementById("head");
  }

  update(data) {
    const { summary, evaluations, timeline } = data;
    const far = summary.steps
      ? `step ${grouped.format(summary.step)} of ${grouped.format(summary.steps)}`
      : `step ${grouped.format(summary.step)}`;
    const share = summary.steps ? Math.min(1, summary.step / summary.steps) : null;
    const bar = element("div", { class: "progress" }, element("i"));
    bar.firstChild.style.width = `${100 * (share || 0)}%`;
    this.node.replaceChildren(
      element("div", { class: "wide" },
        element("div", { class: "title" },
          element("p", { class: "brand" }, "areal_ray"),
          element("h1", {}, summary.name),
          element("p", { class: "far" }, far, share === null ? "" : ` · ${percent(share)}`,
            summary.version === null ? "" : ` · version ${grouped.format(summary.version)}`)),
        this.status(data),
        share === null ? null : bar,
        element("dl", { class: "tiles" }, ...this.tiles(summary, evaluations, timeline, data))));
  }

  status(data) {
    if (this.live) return element("p", { class: "status live" }, element("i"), this.live.text());
    return element("p", { class: "status" }, `written ${moment(data.made_at)}`);
  }

  tiles(summary, evaluations, timeline, data) {
    const { first, last } = evaluations;
    const errors = timeline.counts.error || 0;
    const warnings = timeline.counts.warning || 0;
    const pace = summary.seconds ? summary.generated_tokens / summary.seconds : 0;
    return [
      tile("Last reward", reward(summary.reward), "mean of the last step's samples"),
      tile("Held out", first ? (first.step === last.step ? reward(first.reward) : [reward(first.reward), element("span", { class: "arrow" }, " → "), reward(last.reward)]) : "–",
        first ? `step ${first.step} to ${last.step}, ${grouped.format(last.prompts)} prompts` : "no evaluation yet"),
      tile("Duration", duration(summary.seconds), summary.step && summary.steps > summary.step ? `about ${duration((summary.seconds / summary.step) * (summary.steps - summary.step))} to go` : "of training"),
      tile("Tokens", number(summary.generated_tokens), `generated, ${number(pace)} a second`),
      tile("Failures", grouped.format(errors), `${warnings} warning${warnings === 1 ? "" : "s"}, ${summary.groups_failed} group${summary.groups_failed === 1 ? "" : "s"} failed`, errors ? "bad" : ""),
    ];
  }
}

function tile(name, value, note, kind = "") {
  return element("div", { class: `tile ${kind}` }, element("dt", {}, name),
    element("dd", {}, ...(Array.isArray(value) ? value : [value])), element("dd", { class: "note" }, note));
}

class Charts {
  constructor(id, title, lead, charts, kind = "") {
    this.charts = charts;
    this.empty = element("p", { class: "notice" }, "No step has been taken yet.");
    this.node = section(id, title, lead, this.empty,
      element("div", { class: `charts ${kind}` }, ...charts.map((chart) => chart.node)));
  }

  update(data) {
    for (const chart of this.charts) {
      chart.width = data.curves.width;
      chart.update(data);
    }
    this.empty.hidden = this.charts.some((chart) => !chart.node.hidden);
  }
}

class TimeSection {
  constructor() {
    this.timeline = new Timeline();
    this.bars = element("div", { class: "bars" });
    this.legend = element("ul", { class: "legend activities" });
    this.none = element("p", { class: "notice" },
      "This run has no timeline.jsonl: its telemetry was off (observability.telemetry), or it has not begun.");
    this.body = element("div", {}, this.legend, this.timeline.node, element("h3", {}, "Shares of the whole run"), this.bars);
    this.node = section("time", "Where the time went",
      "One lane an actor; the height of a colour is its share of that moment.", this.none, this.body);
    this.showsAll = false;
  }

  update(data) {
    const { lanes } = data.timeline;
    this.none.hidden = lanes.length > 0;
    this.body.hidden = lanes.length === 0;
    if (!lanes.length) return;
    const seen = [...ACTIVITIES.filter(({ name }) => lanes.some((lane) => lane.seconds[name])), ABSENT];
    this.legend.replaceChildren(...seen.map(({ name, paint, about }) =>
      element("li", { title: about }, name === ABSENT.name ? element("i", { class: "swatch absent" }) : swatch(paint), name)));
    this.timeline.update(data);
    this.drawBars(lanes);
  }

  drawBars(lanes) {
    const engines = lanes.filter(({ who }) => who.startsWith("engine"));
    const rows = lanes.slice(0, this.showsAll ? lanes.length : LISTED).map(shareBar);
    if (engines.length > 1) rows.unshift(shareBar(together(engines)));
    if (lanes.length > LISTED) {
      rows.push(element("button", {
        type: "button", class: "more",
        onclick: () => {
          this.showsAll = !this.showsAll;
          this.drawBars(lanes);
        },
      }, this.showsAll ? "Show fewer" : `Show all ${lanes.length}`));
    }
    this.bars.replaceChildren(...rows);
  }
}

function together(lanes) {
  const all = { who: `all ${lanes.length} engines`, seconds: {}, absent_s: 0, tokens: 0 };
  for (const lane of lanes) {
    for (const [name, value] of Object.entries(lane.seconds)) all.seconds[name] = (all.seconds[name] || 0) + value;
    all.absent_s += lane.absent_s;
    all.tokens += lane.tokens;
  }
  return all;
}

function shareBar(lane) {
  const total = Object.values(lane.seconds).reduce((sum, one) => sum + one, lane.absent_s) || 1;
  const parts = ACTIVITIES.map((one) => ({ ...one, seconds: lane.seconds[one.name] || 0 }));
  parts.push({ ...ABSENT, seconds: lane.absent_s });
  const there = parts.filter((one) => one.seconds / total > 0.0005);
  const bar = element("div", { class: "bar" }, ...there.map((one) => {
    const piece = element("i", { class: one.name === ABSENT.name ? "absent" : "" });
    piece.style.flexGrow = one.seconds / total;
    if (one.name !== ABSENT.name) piece.style.background = `var(${one.paint})`;
    return piece;
  }));
  const tell = (event) => tip.show(event, ...tipRows(lane.who, [
    ...there.map((one) => ({ name: one.name, paint: one.paint, value: `${percent(one.seconds / total)} · ${seconds(one.seconds)}` })),
    ...(lane.tokens ? [{ name: "tokens", value: number(lane.tokens) }] : []),
  ]));
  bar.addEventListener("pointermove", tell);
  bar.addEventListener("pointerleave", () => tip.hide());
  return element("div", { class: "share" }, element("span", { class: "who", title: lane.who }, lane.who), bar,
    element("span", { class: "value" }, `${percent((lane.seconds.busy || 0) / total)} busy`));
}

class Events {
  constructor(timeSection) {
    this.timeSection = timeSection;
    this.level = "all";
    this.filters = element("div", { class: "filters" });
    this.rows = element("tbody");
    this.table = element("div", { class: "scroll" }, element("table", { class: "events" },
      element("thead", {}, element("tr", {}, ...["Level", "Run time", "Clock", "Who", "What"].map((name) => element("th", { scope: "col" }, name)))),
      this.rows));
    this.none = element("p", { class: "notice" });
    this.node = section("events", "Failures and recoveries", "What happened once. A row leads to its place on the timeline.",
      this.filters, this.none, this.table);
  }

  update(data) {
    this.data = data;
    const { counts, events } = data.timeline;
    const known = JSON.stringify(counts);
    if (known === this.known) return;
    this.known = known;
    const all = Object.values(counts).reduce((sum, one) => sum + one, 0);
    this.table.hidden = this.filters.hidden = all === 0;
    const left = all - events.length;
    this.none.hidden = all > 0 && left === 0;
    this.none.textContent = all === 0
      ? "Nothing was told: no loss, no recovery, no command."
      : `${grouped.format(left)} more happened in between; the first and the last of each level are listed.`;
    this.draw();
  }

  draw() {
    const { counts, events } = this.data.timeline;
    const all = Object.values(counts).reduce((sum, one) => sum + one, 0);
    this.filters.replaceChildren(...["all", "error", "warning", "info"].map((level) =>
      element("button", {
        type: "button", "aria-pressed": String(level === this.level),
        onclick: () => {
          this.level = level;
          this.draw();
        },
      }, level === "all" ? "all" : element("i", { class: `level ${level}` }), level === "all" ? "" : level,
      element("b", {}, grouped.format(level === "all" ? all : counts[level] || 0)))));
    const chosen = events.filter(({ level }) => this.level === "all" || level === this.level);
    this.rows.replaceChildren(...chosen.map((event) => element("tr", { tabindex: "0", onclick: () => this.find(event), onkeydown: (key) => key.key === "Enter" && this.find(event) },
      element("td", {}, element("span", { class: `chip ${event.level}` }, event.level)),
      element("td", { class: "value" }, clock(event.t)),
      element("td", { class: "value" }, moment(event.at)),
      element("td", {}, event.who),
      element("td", { class: "text" }, event.text))));
  }

  find(event) {
    const { timeline } = this.timeSection;
    if (!timeline.lanes || !timeline.lanes.length) return;
    timeline.show(event.t - 20, event.t + 40);
    timeline.node.scrollIntoView({ behavior: "smooth", block: "center" });
  }
}

class Lags {
  constructor() {
    this.list = element("tbody");
    this.more = element("button", { type: "button", class: "more", onclick: () => {
      this.showsAll = !this.showsAll;
      this.draw();
    } });
    this.none = element("p", { class: "notice" }, "No step has been taken yet.");
    this.table = element("table", { class: "lags" }, element("thead", {}, element("tr", {},
      ...["Actor", "Over the run", "Last", "Worst"].map((name) => element("th", { scope: "col" }, name)))), this.list);
    this.node = section("loops", "Event loops",
      "How late each actor’s loop runs: the 99th percentile over ten minutes. Past 100 ms something blocks it.",
      this.none, this.table, this.more);
  }

  update(data) {
    this.lags = data.lags;
    this.draw();
  }

  draw() {
    const { lags } = this;
    this.none.hidden = lags.length > 0;
    this.table.hidden = lags.length === 0;
    this.more.hidden = lags.length <= LISTED;
    this.more.textContent = this.showsAll ? "Show fewer" : `Show all ${lags.length}`;
    this.list.replaceChildren(...lags.slice(0, this.showsAll ? lags.length : LISTED).map((lag) =>
      element("tr", { class: lag.worst_ms > 100 ? "late" : "" },
        element("td", {}, lag.who), element("td", {}, sparkline(lag.steps, lag.p99_ms)),
        element("td", { class: "value" }, lag.last_ms === null ? "–" : `${number(lag.last_ms)} ms`),
        element("td", { class: "value" }, `${number(lag.worst_ms)} ms`))));
  }
}
