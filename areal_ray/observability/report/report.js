// Puts the page together, and keeps it up to date when it is served.

const live = {
  at: Date.now(),
  failed: false,
  read: 1,
  text() {
    const at = timeOfDay(this.at / 1000);
    if (this.failed) return `not reachable since ${at}: the run may have ended`;
    if (this.read < 1) return `reading the run’s files: ${percent(this.read)}`;
    return `live · as of ${at}`;
  },
};

function start() {
  const source = document.getElementById("data");
  const refresh = Number(source.dataset.refresh || 0);
  const head = new Head(refresh ? live : null);
  const time = new TimeSection();
  const { rewards, staleness, throughput, updates, learning } = stepCharts();
  const sections = [
    rewards, time, new Events(time), staleness, throughput, updates, learning,
    new Lags(), new Samples(), new ConfigText(),
  ];
  document.getElementById("main").append(...sections.map(({ node }) => node));
  const links = sections.map(({ node }) =>
    element("a", { href: `#${node.id}` }, node.querySelector("h2").textContent));
  document.getElementById("sections").append(element("div", { class: "wide" }, ...links));
  const update = (data) => {
    live.read = data.read;
    for (const one of [head, ...sections]) one.update(data);
    document.getElementById("foot").textContent = footer(data);
  };
  update(JSON.parse(source.textContent));
  if (refresh) follow(refresh, update);
}

function footer({ curves: { width }, unreadable_lines: lines, made_at: at }) {
  const parts = [];
  if (width > 1) {
    parts.push(`Each point of a curve is ${width} steps: their mean, from lowest to highest.`);
  }
  if (lines) parts.push(`${counted(lines, "line")} of the run’s files could not be read.`);
  return [...parts, `Made by areal_ray, ${moment(at)}.`].join(" ");
}

async function follow(refresh, update) {
  let tag = "";
  for (;;) {
    await new Promise((done) => setTimeout(done, refresh * 1000));
    if (document.hidden) continue;
    try {
      const request = { headers: { "If-None-Match": tag }, cache: "no-store" };
      const answer = await fetch("data.json", request);
      live.failed = !(answer.ok || answer.status === 304);
      if (!live.failed) live.at = Date.now();
      if (answer.ok) {
        tag = answer.headers.get("ETag");
        update(await answer.json());
      }
    } catch {
      live.failed = true; // and shown; it is asked again
    }
    const status = document.querySelector(".status.live");
    status.classList.toggle("away", live.failed);
    status.lastChild.textContent = live.text();
  }
}

start();
