// What is read rather than looked at: events, event loops, samples, the configuration.

const LEVELS = ["error", "warning", "info"];
const LATE_MS = 100;
const PLACE_NAMES = { 2: ["Early", "Late"], 3: ["Early", "Halfway", "Late"] };

class Events {
  constructor(timeSection) {
    this.timeSection = timeSection;
    this.level = "all";
    this.filters = element("div", { class: "filters" });
    this.rows = element("tbody");
    this.table = element("div", { class: "scroll" },
      element("table", { class: "events" },
        tableHead("Level", "Run time", "Clock", "Who", "What"), this.rows));
    this.none = notice("");
    this.node = section("events", "Failures and recoveries",
      "What happened once. A row leads to its place on the timeline.",
      this.filters, this.none, this.table);
  }

  update({ timeline: { counts, events } }) {
    const known = JSON.stringify(counts);
    if (known === this.known) return;
    this.known = known;
    this.events = events;
    const all = LEVELS.reduce((sum, level) => sum + (counts[level] || 0), 0);
    this.counts = { ...counts, all };
    const left = all - events.length;
    this.table.hidden = this.filters.hidden = all === 0;
    this.none.hidden = all > 0 && left === 0;
    this.none.textContent = all === 0
      ? "Nothing was told: no loss, no recovery, no command."
      : `${grouped.format(left)} more happened in between: of each level, the first and the last `
        + "are listed.";
    this.draw();
  }

  draw() {
    this.filters.replaceChildren(...["all", ...LEVELS].map((level) => this.filter(level)));
    const chosen = this.events.filter(({ level }) => ["all", level].includes(this.level));
    this.rows.replaceChildren(...chosen.map((event) => this.row(event)));
  }

  filter(level) {
    const choose = () => {
      this.level = level;
      this.draw();
    };
    const pressed = String(level === this.level);
    return element("button", { type: "button", "aria-pressed": pressed, onclick: choose },
      level === "all" ? null : element("i", { class: `level ${level}` }), level,
      element("b", {}, grouped.format(this.counts[level] || 0)));
  }

  row(event) {
    const find = () => this.find(event);
    const onkeydown = ({ key }) => key === "Enter" && find();
    return element("tr", { tabindex: "0", onclick: find, onkeydown },
      element("td", {}, element("span", { class: `chip ${event.level}` }, event.level)),
      element("td", { class: "value" }, clock(event.t)),
      element("td", { class: "value" }, moment(event.at)),
      element("td", {}, event.who),
      element("td", { class: "text" }, event.text));
  }

  find(event) {
    const { timeline } = this.timeSection;
    if (!timeline.data) return;
    timeline.show(event.t - 20, event.t + 40);
    timeline.node.scrollIntoView({ behavior: "smooth", block: "center" });
  }
}

class Lags {
  constructor() {
    this.rows = element("tbody");
    this.table = element("table", { class: "lags" },
      tableHead("Actor", "Over the run", "Last", "Worst"), this.rows);
    const toggle = () => {
      this.showsAll = !this.showsAll;
      this.draw();
    };
    this.more = element("button", { type: "button", class: "more", onclick: toggle });
    this.none = notice("No step has been taken yet.");
    this.node = section("loops", "Event loops",
      "How late each actor’s loop runs: the 99th percentile over ten minutes. "
      + `Past ${LATE_MS} ms something blocks it.`,
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
    const listed = lags.slice(0, this.showsAll ? lags.length : LISTED);
    this.rows.replaceChildren(...listed.map((lag) =>
      element("tr", { class: lag.worst_ms > LATE_MS ? "late" : "" },
        element("td", {}, lag.who),
        element("td", {}, sparkline(lag.steps, lag.p99_ms)),
        element("td", { class: "value" }, lag.last_ms === null ? "–" : `${number(lag.last_ms)} ms`),
        element("td", { class: "value" }, `${number(lag.worst_ms)} ms`))));
  }
}

class Samples {
  constructor() {
    this.none = notice("No sample has been trained on yet.");
    this.body = element("div");
    this.node = section("samples", "Samples to read",
      "The best and the worst at a few places of the run, each of another prompt.",
      this.none, this.body);
  }

  update({ samples }) {
    // Only when they differ: whoever reads one must not lose the place.
    const known = JSON.stringify(samples);
    if (known === this.known) return;
    this.known = known;
    this.none.hidden = samples.length > 0;
    const names = PLACE_NAMES[samples.length] || [];
    this.body.replaceChildren(...samples.map((place, nth) => samplePlace(place, names[nth] || "")));
  }
}

function samplePlace(place, name) {
  const [first, last] = [grouped.format(place.first_step), grouped.format(place.last_step)];
  const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
  return element("div", { class: "place" },
    element("h3", {}, name,
      element("small", {}, `${steps} · of ${counted(place.samples, "sample")}`)),
    element("div", { class: "pair" },
      element("div", {}, element("h4", {}, "Best"), ...place.best.map(sampleCard)),
      element("div", {}, element("h4", {}, "Worst"), ...place.worst.map(sampleCard))));
}

function sampleCard(sample) {
  const facts = [
    `step ${grouped.format(sample.step)}`,
    versionsOf(sample),
    counted(sample.tokens, "token"),
    ...(sample.finish_reason === "length" ? ["cut off"] : []),
  ];
  return element("article", { class: "sample" },
    element("header", {},
      element("b", { class: "reward" }, reward(sample.reward)),
      element("span", {}, facts.join(" · "))),
    quoted("prompt", sample.prompt),
    quoted("sampled", sample.text),
    sample.answer === null ? null : quoted("expected", sample.answer));
}

function versionsOf({ oldest_version: oldest, newest_version: newest }) {
  if (oldest === null) return "no version";
  return oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`;
}

function quoted(name, text) {
  return element("div", { class: `quoted ${name}` },
    element("span", {}, name), element("pre", {}, text));
}

class ConfigText {
  constructor() {
    this.none = notice("There is no config.yaml.");
    this.text = element("pre", { class: "config" });
    this.node = section("config", "Configuration", "As resolved when the run began.",
      this.none, this.text);
  }

  update({ config }) {
    if (config === this.known) return;
    this.known = config;
    this.none.hidden = config !== "";
    this.text.hidden = config === "";
    this.text.replaceChildren(...config.split("\n").flatMap(configLine));
  }
}

function configLine(line) {
  const found = /^(\s*(?:- )?)([^\s:#'"][^:]*):(.*)$/.exec(line);
  return found ? [found[1], element("b", {}, found[2]), `:${found[3]}\n`] : [`${line}\n`];
}
