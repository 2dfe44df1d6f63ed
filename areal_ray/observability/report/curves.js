// Which curves there are: the sections that are made of charts over steps.

const MAIN = "--train-smooth";

class Charts {
  constructor(id, title, lead, kind, charts) {
    this.charts = charts;
    this.none = notice("No step has been taken yet.");
    this.node = section(id, title, lead, this.none,
      element("div", { class: `charts ${kind}` }, ...charts.map((chart) => chart.node)));
  }

  update(data) {
    for (const chart of this.charts) chart.update(data);
    this.none.hidden = this.charts.some((chart) => !chart.node.hidden);
  }
}

function column(data, field) {
  return data.curves.columns[field] || { mean: [], low: [], high: [] };
}

// A field of the steps: the mean of each point, from the lowest to the highest.
function curve(data, field, name, paint) {
  const { mean, low, high } = column(data, field);
  return { name, paint, steps: data.curves.steps, values: mean, low, high };
}

// The highest of each point, without a band.
function highest(data, field) {
  const { mean, high } = column(data, field);
  return high.length ? high : mean;
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

function rewardCurves(data) {
  const { steps, width } = data.curves;
  const raw = curve(data, "reward", "training", MAIN);
  const all = [raw];
  if (steps.length > 12) {
    raw.name = width > 1 ? `training, each ${width} steps` : "training, each step";
    raw.paint = "--train";
    raw.thin = true;
    all.push({ name: "training, smoothed", paint: MAIN, steps, values: smoothed(raw.values) });
  }
  const { steps: evaluated, rewards } = data.evaluations;
  all.push({
    name: "held out, greedy", paint: "--held", steps: evaluated, values: rewards, dots: true,
  });
  return all;
}

function stalenessCurves(data) {
  const { steps } = data.curves;
  const most = { name: "most", paint: "--held", steps, values: highest(data, "staleness_max") };
  return [curve(data, "staleness_mean", "mean", MAIN), most];
}

function tokensByAge(data) {
  const { steps, staleness_tokens: ages } = data.curves;
  return ages.map((values, age) => ({
    name: age === 8 ? "8 or more" : String(age), paint: `--age-${age}`, steps, values,
  }));
}

function updatePhases(data) {
  return [
    curve(data, "staged_s", "staging", "--weights"),
    curve(data, "commit_s", "commit", "--saving"),
    curve(data, "pause_s", "longest pause", "--paused"),
  ];
}

function updatesTriedAgain(data) {
  const attempts = highest(data, "update_attempts");
  return data.curves.steps
    .map((step, nth) => ({ step, text: `step ${step}: ${attempts[nth]} attempts` }))
    .filter((_, nth) => attempts[nth] > 1);
}

function attemptsNote({ summary: { retried_updates: again } }) {
  if (!again) return "No update needed a second attempt.";
  return `▲ ${counted(again, "update")} needed more than one attempt.`;
}

// A chart of one field.
function plain(title, field, more = {}) {
  const series = (data) => [{ ...curve(data, field, title.toLowerCase(), MAIN), unnamed: true }];
  return new Chart({ title, height: 150, series, ...more });
}

function stepCharts() {
  const rewards = new Chart({
    title: "Mean reward",
    height: 290,
    series: rewardCurves,
    note: (data) => (data.evaluations.first ? "" : "No held-out prompts were evaluated."),
  });
  const trainerStep = (data) => [
    curve(data, "train_s", "computing", "--busy"),
    curve(data, "waited_s", "waiting for data", "--data"),
  ];
  return {
    rewards: new Charts("reward", "Reward", null, "one", [rewards]),
    staleness: new Charts("staleness", "Staleness",
      "How many versions older than the trainer’s weights the tokens were that it learnt from.",
      "two", [
        new Chart({ title: "Versions old", from: 0, series: stalenessCurves }),
        new Chart({ title: "Tokens by age", stacked: true, series: tokensByAge }),
      ]),
    throughput: new Charts("throughput", "Throughput", null, "two", [
      plain("Tokens a second, all engines", "tokens_per_s", { from: 0, height: 210 }),
      new Chart({ title: "A step of the trainer", from: 0, unit: "s", series: trainerStep }),
      plain("Engines serving", "engines", { from: 0 }),
      plain("Groups in the queue", "queue_groups", { from: 0 }),
    ]),
    updates: new Charts("updates", "Weight updates",
      "Staging goes on beside generation; generation stands still for the pause alone.",
      "one", [new Chart({
        title: "Phases of each update",
        height: 250,
        unit: "s",
        log: true,
        bridged: true,
        series: updatePhases,
        marks: updatesTriedAgain,
        note: attemptsNote,
      })]),
    learning: new Charts("learning", "Learning", null, "many", [
      plain("Loss", "loss"),
      plain("Gradient norm", "grad_norm", { from: 0 }),
      plain("KL to the sampler", "kl_to_behaviour"),
      plain("Clipped part", "clipped", { from: 0 }),
      plain("Entropy", "entropy"),
      plain("KL to the reference", "kl_to_reference"),
      plain("Answer’s length in tokens", "response_tokens", { from: 0 }),
      plain("Learning rate", "lr", { from: 0 }),
    ]),
  };
}
