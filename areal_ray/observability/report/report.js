// Puts the page together, and keeps it up to date when it is served.

const PLACE_NAMES = { 1: [""], 2: ["Early", "Late"], 3: ["Early", "Halfway", "Late"] };

class Samples {
  constructor() {
    this.body = element("div");
    this.node = section("samples", "Samples to read",
      "The best and the worst at a few places of the run, each of another prompt.", this.body);
  }

  update(data) {
    const known = JSON.stringify(data.samples);
    if (known === this.known) return;
    this.known = known;
    const names = PLACE_NAMES[data.samples.length] || [];
    const places = data.samples.map((place, nth) => element("div", { class: "place" },
      element("h3", {}, names[nth] || "", element("small", {}, stepsOf(place), ` · of ${grouped.format(place.samples)} samples`)),
      element("div", { class: "pair" }, samplesOf("Best", place.best), samplesOf("Worst", place.worst))));
    this.body.replaceChildren(...(places.length ? places : [element("p", { class: "notice" }, "No sample has been trained on yet.")]));
  }
}

function stepsOf({ first_step: first, last_step: last }) {
  return first === last ? `step ${grouped.format(first)}` : `steps ${grouped.format(first)} to ${grouped.format(last)}`;
}

function samplesOf(title, samples) {
  return element("div", {}, element("h4", {}, title), ...samples.map((sample) => element("article", { class: "sample" },
    element("header", {}, element("b", { class: "reward" }, reward(sample.reward)),
      element("span", {}, `step ${grouped.format(sample.step)} · ${versionsOf(sample)} · ${grouped.format(sample.tokens)} tokens`,
        sample.finish_reason === "length" ? " · cut off" : "")),
    quoted("prompt", sample.prompt), quoted("sampled", sample.text),
    sample.answer === null ? null : quoted("expected", sample.answer))));
}

function versionsOf({ oldest_version: oldest, newest_version: newest }) {
  if (oldest === null) return "no version";
  return oldest === newest ? `version ${oldest}` : `versions ${oldest} to ${newest}`;
}

function quoted(name, text) {
  return element("div", { class: `quoted ${name}` }, element("span", {}, name), element("pre", {}, text));
}

class ConfigText {
  constructor() {
    this.text = element("pre", { class: "config" });
    this.node = section("config", "Configuration", "As resolved when the run began.", this.text);
  }

  update(data) {
    if (data.config === this.known) return;
    this.known = data.config;
    this.text.replaceChildren(...(data.config ? data.config.split("\n").flatMap(configLine) : ["There is no config.yaml."]));
  }
}

function configLine(line) {
  const found = /^(\s*(?:- )?)([^\s:#'"][^:]*):(.*)$/.exec(line);
  return found ? [found[1], element("b", {}, found[2]), `:${found[3]}\n`] : [`${line}\n`];
}

function stepCharts() {
  const small = { height: 150 };
  const plain = (title, field, paint, more = {}) => new Chart({
    title, ...small, ...more, series: (data) => [curve(data, field, title.toLowerCase(), paint, { unnamed: true })],
  });
  return [
    new Charts("reward", "Reward", null, [new Chart({
      title: "Mean reward", height: 290,
      series: (data) => {
        const raw = curve(data, "reward", "training, sampled", "--train", { thin: true });
        const held = data.evaluations;
        const all = [raw];
        if (raw.values.length > 12) {
          raw.name = "training, each step";
          all.push({ ...curve(data, "reward", "training, smoothed", "--train-smooth", { low: [], high: [] }), values: smoothed(raw.values) });
        }
        if (held.steps.length) all.push({ name: "held out, greedy", paint: "--held", steps: held.steps, values: held.rewards, dots: true });
        return all;
      },
      note: (data) => (data.evaluations.steps.length ? "" : "No held-out prompts were evaluated."),
    })], "one"),
    new Charts("staleness", "Staleness", "How many versions older than the trainer’s weights the tokens were that it learnt from.", [
      new Chart({ title: "Versions old", from: 0, series: (data) => [curve(data, "staleness_mean", "mean", "--train-smooth"),
        { ...curve(data, "staleness_max", "most", "--held"), values: column(data, "staleness_max").high?.length ? column(data, "staleness_max").high : column(data, "staleness_max").mean, low: [], high: [] }] }),
      new Chart({ title: "Tokens by age", stacked: true, series: (data) => data.curves.staleness_tokens.map((values, age) => ({
        name: age === 8 ? "8 or more" : String(age), paint: `--age-${age}`, steps: data.curves.steps, values })) }),
    ]),
    new Charts("throughput", "Throughput", null, [
      new Chart({ title: "Tokens a second, all engines", from: 0, series: (data) => [curve(data, "tokens_per_s", "tokens/s", "--train-smooth", { unnamed: true })] }),
      new Chart({ title: "A step of the trainer", from: 0, unit: "s", series: (data) => [curve(data, "train_s", "computing", "--busy"), curve(data, "waited_s", "waiting for data", "--data")] }),
      plain("Engines serving", "engines", "--train-smooth", { from: 0 }),
      plain("Groups in the queue", "queue_groups", "--train-smooth", { from: 0 }),
    ]),
    new Charts("updates", "Weight updates", "Staging goes on beside generation; generation stands still for the pause alone.", [
      new Chart({ title: "Phases of each update", height: 250, unit: "s", log: true, bridged: true, series: (data) => [
        curve(data, "staged_s", "staging", "--weights"), curve(data, "commit_s", "commit", "--saving"), curve(data, "pause_s", "longest pause", "--paused")],
      marks: (data) => retried(data),
      note: (data) => {
        const { retried_updates: again } = data.summary;
        return again ? `▲ ${grouped.format(again)} update${again === 1 ? "" : "s"} took more than one attempt.` : "Every update succeeded at the first attempt.";
      } })], "one"),
    new Charts("learning", "Learning", null, [
      plain("Loss", "loss", "--train-smooth"), plain("Gradient norm", "grad_norm", "--train-smooth", { from: 0 }),
      plain("KL to the sampler", "kl_to_behaviour", "--train-smooth"), plain("Clipped part", "clipped", "--train-smooth", { from: 0 }),
      plain("Entropy", "entropy", "--train-smooth"), plain("KL to the reference", "kl_to_reference", "--train-smooth"),
      plain("Answer’s length in tokens", "response_tokens", "--train-smooth", { from: 0 }), plain("Learning rate", "lr", "--train-smooth", { from: 0 }),
    ], "many"),
  ];
}

function retried(data) {
  const { mean, high } = column(data, "update_attempts");
  const most = high?.length ? high : mean;
  return data.curves.steps.flatMap((step, nth) => (most[nth] > 1 ? [{ step, text: `step ${step}: ${most[nth]} attempts` }] : []));
}

const live = {
  at: Date.now(),
  failed: false,
  text() {
    if (this.failed) return `not reachable since ${timeOfDay(this.at / 1000)}: the run may have ended`;
    if (this.read < 1) return `reading the run’s files: ${percent(this.read)}`;
    return `live · as of ${timeOfDay(this.at / 1000)}`;
  },
};

function start() {
  const source = document.getElementById("data");
  const refresh = Number(source.dataset.refresh || 0);
  const head = new Head(refresh ? live : null);
  const time = new TimeSection();
  const [rewards, staleness, throughput, updates, learning] = stepCharts();
  const sections = [rewards, time, new Events(time), staleness, throughput, updates, learning, new Lags(), new Samples(), new ConfigText()];
  document.getElementById("main").append(...sections.map(({ node }) => node));
  document.getElementById("sections").append(element("div", { class: "wide" }, ...sections.map(({ node }) =>
    element("a", { href: `#${node.id}` }, node.querySelector("h2").textContent))));
  const update = (data) => {
    live.read = data.read;
    for (const one of [head, ...sections]) one.update(data);
    const dropped = data.unreadable_lines ? `${data.unreadable_lines} line${data.unreadable_lines === 1 ? "" : "s"} could not be read (cut short). ` : "";
    const wide = data.curves.width > 1 ? `Each point of a curve is ${data.curves.width} steps: their mean, and from the lowest to the highest. ` : "";
    document.getElementById("foot").textContent = `${wide}${dropped}Made by areal_ray, ${moment(data.made_at)}.`;
  };
  update(JSON.parse(source.textContent));
  if (refresh) follow(refresh, head, update);
}

async function follow(refresh, head, update) {
  let tag = "";
  let data = null;
  for (;;) {
    await new Promise((done) => setTimeout(done, refresh * 1000));
    if (document.hidden) continue;
    try {
      const answer = await fetch("data.json", { headers: { "If-None-Match": tag }, cache: "no-store" });
      live.failed = !(answer.ok || answer.status === 304);
      if (!live.failed) live.at = Date.now();
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        data = await answer.json();
        update(data);
        document.body.dataset.step = data.summary.step;
        continue;
      }
    } catch {
      live.failed = true;
    }
    const status = document.querySelector(".status.live");
    status.classList.toggle("away", live.failed);
    status.lastChild.textContent = live.text();
  }
}

start();
