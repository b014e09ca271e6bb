"use strict";
(function () {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function themed(layout) {
    const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line") };
    const found = Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--front"), family: "system-ui, sans-serif", size: 13 },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--front") } },
    });
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis/.test(key)) found[key] = Object.assign({}, axis, layout[key]);
    }
    return found;
  }

  // A legend of HTML: it wraps on a phone, where plotly's own would take the chart's room.
  function legend(node, data) {
    const list = document.createElement("ul");
    list.className = "legend";
    for (const trace of data) {
      if (trace.showlegend === false || !trace.name) continue;
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      const marker = trace.marker || {};
      if (trace.type === "bar" || trace.stackgroup) {
        swatch.className = "swatch";
        swatch.dataset.shape = (marker.pattern || {}).shape || "";
        swatch.style.backgroundColor = trace.fillcolor || marker.color;
        if (marker.line) swatch.style.border = "2px solid " + marker.line.color;
      } else if (trace.mode === "markers") {
        swatch.className = "swatch mark";
        swatch.style.borderLeft = "3px solid " + marker.color;
      } else {
        swatch.className = "swatch stroke";
        const dashes = { solid: "solid", dot: "dotted", dash: "dashed" };
        swatch.style.borderTop = "3px " + (dashes[trace.line.dash] || "double") + " " + trace.line.color;
      }
      item.append(swatch, trace.name);
      list.append(item);
    }
    const before = node.parentElement.querySelector('ul.legend[data-for="' + node.id + '"]');
    list.dataset.for = node.id;
    if (before) before.replaceWith(list);
    else node.before(list);
  }

  const settings = { responsive: true, displaylogo: false, displayModeBar: false };

  function draw(id) {
    const node = document.getElementById(id);
    const chart = charts[id];
    const one = chart.choices ? chart.choices[node.dataset.choice || chart.chosen] : chart;
    if (one.height) node.style.setProperty("--height", one.height);
    legend(node, one.data);
    return Plotly.react(node, one.data, themed(one.layout), settings);
  }

  function drawAll() {
    return Promise.all(Object.keys(charts).map(draw)).then(function () {
      document.documentElement.dataset.drawn = "yes";
    });
  }

  for (const select of document.querySelectorAll("select[data-for]")) {
    select.addEventListener("change", function () {
      document.getElementById(select.dataset.for).dataset.choice = select.value;
      draw(select.dataset.for);
    });
  }
  dark.addEventListener("change", drawAll);
  drawAll();
})();
