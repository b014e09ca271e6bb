"use strict";
(async function () {
  // What `_pack` in html.py has packed: base 85, with "," in place of "<".
  function unpacked(id) {
    const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";
    const values = new Uint8Array(128);
    for (let n = 0; n < 85; n++) values[digits.charCodeAt(n)] = n;
    const text = document.getElementById(id).textContent;
    const bytes = new DataView(new ArrayBuffer(4 * Math.ceil(text.length / 5)));
    for (let at = 0; at < text.length; at += 5) {
      let number = 0;
      for (let n = at; n < at + 5; n++) number = 85 * number + (n < text.length ? values[text.charCodeAt(n)] : 84);
      bytes.setUint32((at / 5) * 4, number);
    }
    const packed = new Blob([bytes.buffer.slice(0, Math.floor((text.length * 4) / 5))]);
    return new Response(packed.stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }

  const charts = JSON.parse(await unpacked("charts"));
  const plotly = document.createElement("script");
  plotly.textContent = await unpacked("plotly");
  document.body.append(plotly);
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

  // A line as plotly draws it: its dashes are multiples of the width, of at least 3.
  const dashes = {
    solid: "", dot: "1 1", dash: "3 3", longdash: "5 5", dashdot: "3 1 1 1", longdashdot: "5 2 1 2",
  };

  function stroke(line, marker, upright) {
    const unit = Math.max(3, line.width);
    const steps = dashes[line.dash || "solid"].split(" ").map(function (n) { return n * unit; });
    const symbols = {
      circle: '<circle cx="18" cy="6" r="3"', diamond: '<path d="M18 1 L23 6 L18 11 L13 6 Z"',
    };
    const mark = marker ? symbols[marker.symbol] + ' fill="' + marker.color + '"/>' : "";
    const ends = upright ? 'x1="18" x2="18" y2="12"' : 'x2="36" y1="6" y2="6"';
    return "<line " + ends + ' stroke="' + line.color + '" stroke-width="' + line.width +
      '" stroke-dasharray="' + steps.join(" ") + '"/>' + mark;
  }

  function swatchOf(trace) {
    const swatch = document.createElement("span");
    const marker = trace.marker || {};
    if (trace.type === "bar" || trace.stackgroup) {
      swatch.className = "swatch";
      swatch.dataset.shape = (trace.fillpattern || marker.pattern || {}).shape || "";
      swatch.style.backgroundColor = trace.fillcolor || marker.color;
      if (marker.line) swatch.style.border = "2px solid " + marker.line.color;
    } else if (marker.symbol === "diamond-open") {
      swatch.innerHTML = '<svg width="14" height="12" aria-hidden="true"><path d="M7 1 L12 6 L7 11 L2 6 Z" fill="none" ' +
        'stroke-width="2" stroke="' + marker.color + '"/></svg>';
    } else if (trace.mode === "markers") {
      swatch.className = "swatch mark";
      swatch.style.borderLeft = "3px solid " + marker.color;
    } else {
      const drawn = stroke(trace.line, /markers/.test(trace.mode) && trace.marker, trace.type === "line");
      swatch.innerHTML = '<svg width="36" height="12" aria-hidden="true">' + drawn + "</svg>";
    }
    return swatch;
  }

  // A legend of HTML: it wraps on a phone, where plotly's own would take the chart's room.
  function legend(node, data, shapes) {
    const list = document.createElement("ul");
    list.className = "legend";
    const named = {};
    for (const one of data.concat(shapes || [])) {
      if (one.showlegend === false || !one.name || named[one.name]) continue;
      named[one.name] = true;
      const item = document.createElement("li");
      item.append(swatchOf(one), one.name);
      list.append(item);
    }
    const before = node.parentElement.querySelector('ul.legend[data-for="' + node.id + '"]');
    list.dataset.for = node.id;
    if (before) before.replaceWith(list);
    else node.before(list);
  }

  // What stages are called has room above a chart, or only their numbers have.
  function fitted(layout, width) {
    const labels = layout.annotations || [];
    const range = (layout.xaxis || {}).range;
    const at = labels.map(function (label) { return ((label.x - range[0]) / (range[1] - range[0])) * (width - 70); });
    const fits = labels.every(function (label, n) {
      return (n + 1 < at.length ? at[n + 1] : width - 70) - at[n] > 7 * label.text.length;
    });
    return Object.assign({}, layout, {
      annotations: labels.map(function (label) { return Object.assign({}, label, fits ? {} : { text: label.name }); }),
    });
  }

  const settings = { responsive: true, displaylogo: false, displayModeBar: false };

  function draw(id) {
    const node = document.getElementById(id);
    const choices = charts[id];
    const one = choices[node.dataset.choice || Object.keys(choices)[0]];
    if (one.height) node.style.setProperty("--height", one.height);
    legend(node, one.data, one.layout.shapes);
    return Plotly.react(node, one.data, fitted(themed(one.layout), node.clientWidth), settings);
  }

  function drawAll() {
    return Promise.all(Object.keys(charts).map(draw)).then(function () {
      document.documentElement.dataset.drawn = "yes";
    });
  }

  for (const box of document.querySelectorAll("input[data-for]")) {
    box.addEventListener("change", function () {
      for (const one of Object.values(charts[box.dataset.for])) {
        one.layout.yaxis.type = box.checked ? "log" : "linear";
      }
      draw(box.dataset.for);
    });
  }
  for (const select of document.querySelectorAll("select[data-for]")) {
    select.addEventListener("change", function () {
      document.getElementById(select.dataset.for).dataset.choice = select.value;
      draw(select.dataset.for);
    });
  }
  dark.addEventListener("change", drawAll);
  window.matchMedia("(max-width: 40rem)").addEventListener("change", drawAll);
  drawAll();
})();
