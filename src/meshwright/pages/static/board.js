// The page of runs: what is shown, the controls, and on a live page new data.
"use strict";
class Board {
  constructor(data) {
    this.state = {
      x: "step",
      logx: false,
      logy: false,
      smooth: 0.6,
      zoom: null,
      marks: true,
      hidden: new Set(),
      only: true,
      sample: null,
    };
    this.read(data);
    this.root = document.getElementById("board");
    this.restore();
    this.build();
    theme.changed.push(() => this.draw());
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(this.root);
    addEventListener("beforeprint", () => this.draw());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.zoom(null);
    });
  }

  read(data) {
    this.data = data;
    this.runs = data.runs.map((run, index) => ({ ...run, index }));
    this.axes = Object.keys(AXES).filter((axis) => this.runs.some((run) => Object.values(run.tables).some((table) => table[axis])));
    if (!this.axes.includes(this.state.x)) this.state.x = "step";
  }

  shown() {
    return this.runs.filter((run) => !this.state.hidden.has(run.name));
  }
  height() {
    return innerWidth < 600 ? 190 : 220;
  }

  build() {
    this.charts = this.data.charts.map((spec) => new Chart(spec, this));
    this.chips = node("div", { class: "chips" });
    this.top = node("div", { class: "bar-top" });
    this.summary = node("div");
    this.rest = node("div");
    const groups = Map.groupBy ? Map.groupBy(this.charts, (chart) => chart.spec.section) : grouped(this.charts, (chart) => chart.spec.section);
    const sections = [...groups].flatMap(([name, charts]) => [
      node("h2", { class: "group" }, name),
      node("div", { class: "grid" }, ...charts.map((chart) => chart.card)),
    ]);
    this.root.replaceChildren(this.summary, this.top, ...sections, this.rest);
    if (this.runs.some((run) => run.tables.step)) this.controls();
    else this.top.hidden = true;
    this.draw();
  }

  controls() {
    const state = this.state,
      change = (call) => () => {
        call();
        this.draw();
      };
    this.buttons = Object.fromEntries(
      this.axes.map((axis) => [
        axis,
        node(
          "button",
          {
            type: "button",
            id: `x-${axis}`,
            onclick: change(() => {
              state.x = axis;
              state.zoom = null;
            }),
          },
          AXES[axis],
        ),
      ]),
    );
    const check = (id, name, key) =>
      node(
        "label",
        {},
        node("input", {
          type: "checkbox",
          id,
          checked: state[key],
          onchange: (event) => {
            state[key] = event.target.checked;
            if (key === "logy")
              this.charts.forEach((chart) => {
                chart.log = null;
              });
            if (key === "logx") state.zoom = null;
            this.draw();
          },
        }),
        name,
      );
    const value = node("output", { id: "smoothing-value" }, String(state.smooth));
    const slider = node("input", {
      type: "range",
      id: "smoothing",
      min: 0,
      max: 0.99,
      step: 0.01,
      value: state.smooth,
      "aria-label": "Smoothing",
      oninput: (event) => {
        state.smooth = +event.target.value;
        value.textContent = event.target.value;
        this.draw();
      },
    });
    this.reset = node("button", { type: "button", id: "reset", hidden: true, onclick: () => this.zoom(null) }, "Reset zoom");
    this.top.replaceChildren(
      node("div", { class: "choice", role: "group", "aria-label": "x axis" }, ...Object.values(this.buttons)),
      node("label", {}, "Smoothing", slider, value),
      check("logx", "log x", "logx"),
      check("logy", "log y", "logy"),
      check("marks", "marks", "marks"),
      node("div", { class: "space" }),
      this.reset,
      node(
        "button",
        {
          type: "button",
          id: "csv",
          title: "Every figure of the runs shown",
          onclick: () => download("runs.csv", csv([CSV_HEAD, ...this.rows()])),
        },
        "Download CSV",
      ),
      this.chips,
    );
  }

  rows() {
    return this.shown().flatMap((run) =>
      Object.entries(run.tables).flatMap(([kind, table]) =>
        Object.entries(table)
          .filter(([name]) => !(name in AXES))
          .flatMap(([name, ys]) => ys.map((y, i) => [run.name, `${kind}/${name}`, ...Object.keys(AXES).map((axis) => table[axis]?.[i]), y])),
      ),
    );
  }

  draw() {
    for (const [axis, button] of Object.entries(this.buttons ?? {})) {
      button.classList.toggle("on", axis === this.state.x);
      button.setAttribute("aria-pressed", axis === this.state.x);
    }
    if (this.reset) this.reset.hidden = !this.state.zoom;
    this.drawChips();
    this.summary.replaceChildren(summary(this.runs));
    this.charts.forEach((chart) => chart.draw());
    this.drawRest();
    this.keep();
  }

  drawChips() {
    this.chips.replaceChildren(
      ...this.runs.map((run) =>
        node(
          "button",
          {
            type: "button",
            class: `chip${this.state.hidden.has(run.name) ? " off" : ""}`,
            style: { "--of": `var(--c${run.index % COLOURS})` },
            title: run.folder,
            "aria-pressed": !this.state.hidden.has(run.name),
            onclick: () => {
              this.state.hidden.delete(run.name) || this.state.hidden.add(run.name);
              this.draw();
            },
          },
          node("i"),
          node("b", {}, run.name),
        ),
      ),
    );
    this.chips.hidden = this.runs.length === 1;
  }

  zoom(range) {
    this.state.zoom = range;
    this.reset.hidden = !range;
    for (const chart of this.charts)
      if (chart.plot) {
        const [xs] = chart.plot.data;
        chart.plot.setScale("x", range ? { min: range[0], max: range[1] } : { min: xs[0], max: xs[xs.length - 1] });
      }
    this.keep();
  }

  hover(from, x) {
    for (const chart of this.charts) if (chart !== from) chart.follow(x);
  }

  drawRest() {
    const runs = this.shown();
    this.rest.replaceChildren(
      ...[bars(runs), samples(runs, this), recipes(this.runs, this.data.differences), events(runs), environments(this.runs)].filter(Boolean),
    );
  }

  // The view is kept in the address, so that a reload or a sent link shows the same.
  keep() {
    const { x, logx, logy, smooth, zoom, marks, hidden } = this.state;
    const kept = {
      ...(x !== "step" && { x }),
      ...(logx && { logx: 1 }),
      ...(logy && { logy: 1 }),
      ...(smooth !== 0.6 && { smooth }),
      ...(zoom && { zoom: zoom.join("~") }),
      ...(!marks && { marks: 0 }),
      ...(hidden.size && { hide: [...hidden].join("~") }),
    };
    try {
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    } catch {
      /* a page within a page has no address */
    }
  }

  restore() {
    const kept = new URLSearchParams(location.hash.slice(1)),
      state = this.state;
    if (this.axes.includes(kept.get("x"))) state.x = kept.get("x");
    state.logx = kept.has("logx");
    state.logy = kept.has("logy");
    state.marks = kept.get("marks") !== "0";
    if (kept.has("smooth") && +kept.get("smooth") >= 0 && +kept.get("smooth") < 1) state.smooth = +kept.get("smooth");
    const zoom = kept.get("zoom")?.split("~").map(Number);
    if (zoom?.length === 2 && zoom.every(Number.isFinite)) state.zoom = zoom;
    kept
      .get("hide")
      ?.split("~")
      .forEach((name) => state.hidden.add(name));
  }
}

const board = new Board(JSON.parse(document.getElementById("data").textContent));
if (board.data.live) {
  const state = document.getElementById("live");
  const poll = async () => {
    try {
      const answer = await fetch(`data?have=${encodeURIComponent(board.data.stamp)}`, { cache: "no-store" });
      state.textContent = "live";
      if (answer.status === 200) {
        const found = await answer.json(),
          same = JSON.stringify(found.charts) === JSON.stringify(board.data.charts) && found.runs.length === board.runs.length;
        board.read(found);
        same ? board.draw() : board.build();
      }
    } catch {
      state.textContent = "the server has ended; this is its last state";
    }
    setTimeout(poll, 2000);
  };
  setTimeout(poll, 2000);
}
