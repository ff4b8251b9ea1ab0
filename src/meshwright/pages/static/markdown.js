// Markdown as elements of the page. Text only ever becomes text nodes, so nothing in it can become markup; a link opens
// only with an address of the web or of mail, and an image is named, not loaded.
"use strict";
const markdown = (() => {
  const DEEP = 8; // lists and quotes within each other
  const LINK = /^(?:https?:\/\/|mailto:)/i;
  const INLINE = new RegExp(
    [
      "\\\\(?<escaped>[!-/:-@\\[-`{-~])",
      "(?<ticks>`+)(?!`)(?<code>[^]{1,4000}?[^`])\\k<ticks>(?!`)",
      String.raw`!\[(?<alt>[^\]]{0,400})\]\((?<image>[^)\s]{0,2000})[^)]{0,200}\)`,
      String.raw`\[(?<label>[^\]]{1,400})\]\(<?(?<to>[^)\s>]{1,2000})>?(?:\s+"[^"]{0,200}")?\)`,
      String.raw`(?<bare>https?:\/\/[^\s<>"'\])]{1,2000}[^\s<>"'\]).,;:!?])`,
      String.raw`\*\*(?=\S)(?<strong>[^]{0,2000}?\S)\*\*(?!\*)`,
      String.raw`(?<![\p{L}\p{N}_])__(?=\S)(?<strong2>[^]{0,2000}?\S)__(?![\p{L}\p{N}_])`,
      String.raw`~~(?=\S)(?<del>[^]{0,2000}?\S)~~`,
      String.raw`\*(?=[^\s*])(?<em>[^]{0,2000}?[^\s*])\*(?!\*)`,
      String.raw`(?<![\p{L}\p{N}_])_(?=[^\s_])(?<em2>[^]{0,2000}?[^\s_])_(?![\p{L}\p{N}_])`,
    ].join("|"),
    "gu",
  );
  const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/, HEADING = /^ {0,3}(#{1,6})(?: +(.*?))?(?: +#+)? *$/;
  const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/, QUOTE = /^ {0,3}> ?/, ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(?=\S)/;
  const COLUMNS = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

  const make = (tag, ...children) => {
    const made = document.createElement(tag);
    made.append(...children);
    return made;
  };
  const link = (to, ...content) => {
    if (!LINK.test(to)) return [...content, ` (${to})`];
    const made = make("a", ...content);
    Object.assign(made, { href: to, target: "_blank", rel: "noopener noreferrer nofollow", title: to });
    return [made];
  };

  function inline(text, depth = 0) {
    if (depth > DEEP) return [text];
    const parts = [];
    let end = 0;
    for (const match of text.matchAll(INLINE)) {
      const is = match.groups, within = (inner) => inline(inner, depth + 1);
      parts.push(text.slice(end, match.index));
      end = match.index + match[0].length;
      if (is.escaped) parts.push(is.escaped);
      else if (is.code) parts.push(make("code", is.code.replace(/^ (.*\S.*) $/s, "$1")));
      else if (is.image !== undefined) parts.push(...(LINK.test(is.image) ? link(is.image, `image: ${is.alt || is.image}`) : [`image: ${is.alt || is.image}`]));
      else if (is.to) parts.push(...link(is.to, ...within(is.label)));
      else if (is.bare) parts.push(...link(is.bare, is.bare));
      else if (is.strong ?? is.strong2) parts.push(make("strong", ...within(is.strong ?? is.strong2)));
      else if (is.del) parts.push(make("del", ...within(is.del)));
      else parts.push(make("em", ...within(is.em ?? is.em2)));
    }
    return [...parts, text.slice(end)].filter((part) => part !== "");
  }

  function code(language, lines) {
    const text = lines.join("\n"), copy = make("button", "Copy");
    Object.assign(copy, { type: "button", className: "copy-code" });
    copy.dataset.copy = text;
    const head = make("div", make("span", language), copy), box = make("div", head, make("pre", make("code", text)));
    head.className = "code-head";
    box.className = "code-box";
    return box;
  }

  const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

  function table(head, rule, rows) {
    const sides = cells(rule).map((cell) => (/^:-+:$/.test(cell) ? "middle" : /-:$/.test(cell) ? "right" : ""));
    const row = (line, tag) => make("tr", ...sides.map((side, i) => Object.assign(make(tag, ...inline(cells(line)[i] ?? "")), { className: side })));
    const made = make("table", make("thead", row(head, "th")), make("tbody", ...rows.map((line) => row(line, "td"))));
    return Object.assign(make("div", made), { className: "scroll" });
  }

  const starts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

  // An item's lines without its indentation, and the index after them.
  function item(lines, at, indent) {
    const taken = [lines[at].slice(indent)];
    let next = at + 1;
    for (; next < lines.length; next++) {
      const line = lines[next], inside = line.search(/\S/) >= indent;
      const lazy = line.trim() && lines[next - 1].trim() && !starts(line);
      if (line.trim() && !inside && !lazy) break;
      if (!line.trim() && !(lines.slice(next + 1).find((later) => later.trim()) ?? "").startsWith(" ".repeat(indent))) break;
      taken.push(inside ? line.slice(indent) : line.trim());
    }
    return [taken, next];
  }

  function list(lines, at, depth) {
    const first = ITEM.exec(lines[at]), ordered = /\d/.test(first[2]), made = make(ordered ? "ol" : "ul");
    if (ordered) made.start = parseInt(first[2]);
    while (at < lines.length) {
      const mark = ITEM.exec(lines[at]);
      if (mark && /\d/.test(mark[2]) === ordered && mark[1].length <= first[1].length + 1) {
        const [inner, next] = item(lines, at, mark[0].length);
        const content = blocks(inner, depth + 1);
        const tight = content[0]?.tagName === "P" && inner.every((line) => line.trim());
        made.append(make("li", ...(tight ? [...content[0].childNodes, ...content.slice(1)] : content)));
        at = next;
      } else if (!lines[at].trim() && lines[at + 1] !== undefined && ITEM.test(lines[at + 1])) at++;
      else break;
    }
    return [made, at];
  }

  function blocks(lines, depth = 0) {
    const made = [];
    for (let at = 0; at < lines.length; ) {
      const line = lines[at], fence = FENCE.exec(line), heading = HEADING.exec(line);
      if (!line.trim()) at++;
      else if (fence) {
        const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},} *$`), end = lines.findIndex((one, i) => i > at && close.test(one));
        made.push(code(fence[2].trim(), lines.slice(at + 1, end < 0 ? lines.length : end)));
        at = end < 0 ? lines.length : end + 1;
      } else if (heading) {
        made.push(make(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2] ?? "")));
        at++;
      } else if (RULE.test(line)) {
        made.push(make("hr"));
        at++;
      } else if (QUOTE.test(line) && depth < DEEP) {
        const begin = at;
        while (at < lines.length && QUOTE.test(lines[at])) at++;
        made.push(make("blockquote", ...blocks(lines.slice(begin, at).map((one) => one.replace(QUOTE, "")), depth + 1)));
      } else if (ITEM.test(line) && depth < DEEP) {
        const [found, next] = list(lines, at, depth);
        made.push(found);
        at = next;
      } else if (line.includes("|") && COLUMNS.test(lines[at + 1] ?? "") && cells(line).length === cells(lines[at + 1]).length) {
        const begin = at;
        for (at += 2; at < lines.length && lines[at].includes("|"); ) at++;
        made.push(table(line, lines[begin + 1], lines.slice(begin + 2, at)));
      } else {
        const begin = at++;
        while (at < lines.length && lines[at].trim() && (depth >= DEEP || !starts(lines[at]))) at++;
        made.push(make("p", ...inline(lines.slice(begin, at).join("\n"))));
      }
    }
    return made;
  }

  return (text) => blocks(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"));
})();
