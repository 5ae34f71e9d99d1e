// Markdown as it is written by models, shown while it comes. markdown-it reads it; nodes are made of what that
// finds, one by one: no text ever becomes markup, and nothing of it is an attribute but the address of a link.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";

/** Blocks nested deeper than this are shown as they were typed: markdown-it would leave out what is in them. */
const NESTED = 40;
/** Characters after which a text is cut at the next empty line, and those of a piece that is shown as typed: what a browser reads at once is bounded. */
const PIECE = 50000, MOST = 100000;
/** Characters of a formula in a line, and lines of one in a block, that are looked through for its end. */
const FORMULA = 2000, FORMULA_LINES = 200;
const LINK = /^(https?:\/\/|mailto:)/i;

const reader = new MarkdownIt({ html: false, linkify: true, maxNesting: NESTED });
reader.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
reader.inline.ruler.before("escape", "formula", inlineFormula);
reader.inline.ruler.before("escape", "break", typedBreak);
reader.block.ruler.before("fence", "formula", blockFormula, { alt: ["paragraph", "reference", "blockquote", "list"] });

// ---- formulas, which stay as they were typed: Markdown would take their backslashes and underscores away

const space = (character) => character === undefined || /\s/.test(character);

/** The end of a formula that begins at `at`; 0 if none does. One between single dollars touches both, has none inside, and no digit follows: prices are none. */
function formulaEnd(text, at) {
  const marks = text.startsWith("\\(", at) ? "\\)" : text.startsWith("\\[", at) ? "\\]" : text.startsWith("$$", at) ? "$$" : text[at] === "$" ? "$" : "";
  if (!marks) return 0;
  const begin = at + marks.length, within = text.slice(begin, begin + FORMULA);
  if (marks === "$" && space(within[0])) return 0;
  for (let found = within.indexOf(marks); found >= 0; found = within.indexOf(marks, found + 1)) {
    const end = begin + found;
    if (text[end - 1] === "\\" && marks === "$") continue;
    return found && !(marks === "$" && (space(text[end - 1]) || /\d/.test(text[end + 1] ?? ""))) ? end + marks.length : 0;
  }
  return 0;
}

function inlineFormula(state, silent) {
  const end = formulaEnd(state.src, state.pos);
  if (!end || end > state.posMax) return false;
  if (!silent) state.push("formula", "", 0).content = state.src.slice(state.pos, end);
  state.pos = end;
  return true;
}

function blockFormula(state, line, last, silent) {
  if (state.sCount[line] - state.blkIndent >= 4) return false;
  const lineAt = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();
  const first = lineAt(line), begin = /^(\$\$|\\\[|\\begin\{([a-z]+\*?)\})/.exec(first);
  if (!begin) return false;
  const end = begin[2] ? `\\end{${begin[2]}}` : begin[1] === "$$" ? "$$" : "\\]";
  let at = line, found = first.length >= begin[1].length + end.length && first.endsWith(end);
  while (!found && (at += 1) < Math.min(last, line + FORMULA_LINES) && state.sCount[at] >= state.blkIndent) found = lineAt(at).endsWith(end);
  if (!found) return false;
  if (silent) return true;
  const token = state.push("formula_block", "", 0);
  token.content = state.getLines(line, at + 1, state.blkIndent, false);
  token.map = [line, at + 1];
  state.line = at + 1;
  return true;
}

/** <br> begins a line, as in cells of tables; no other tag is more than text. */
function typedBreak(state, silent) {
  const found = state.src[state.pos] === "<" && /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
  if (!found) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
}

// ---- from what was read to a tree of what is to be shown

const wanted = (tag, properties = {}, children = []) => ({ tag, properties, children });
const plain = (text) => wanted("p", { className: "plain" }, [text]);
/** Elements by the token that opens or is them. Headings stand below those of the page. */
const ELEMENTS = {
  paragraph: "p", blockquote: "blockquote", bullet_list: "ul", ordered_list: "ol", list_item: "li", em: "em", strong: "strong",
  s: "s", thead: "thead", tbody: "tbody", tr: "tr", th: "th", td: "td",
};
const ALIGNED = { "text-align:right": "right", "text-align:center": "center" };

export function codeBlock(text, language) {
  return wanted("div", { className: "code" }, [
    wanted("div", { className: "over" }, [wanted("span", {}, [language]), wanted("button", { type: "button", className: "copy-code" }, ["Copy"])]),
    wanted("pre", { tabIndex: 0, role: "group", ariaLabel: language ? `Code, ${language}` : "Code" }, [wanted("code", {}, [text])]),
  ]);
}

/** The element that a token opens, and where its children go: a table is in a box that scrolls. */
function opened(token) {
  const name = token.type.replace(/_open$/, "");
  if (name === "heading") return [wanted(`h${Math.min(6, Number(token.tag[1]) + 2)}`)];
  if (name === "table") {
    const table = wanted("table");
    return [wanted("div", { className: "wide-table", tabIndex: 0, role: "group", ariaLabel: "Table" }, [table]), table];
  }
  if (name === "link") {
    const address = token.attrGet("href");
    if (!LINK.test(address)) return [wanted("span", { title: address })];
    return [wanted("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" })];
  }
  if (name === "ordered_list" && token.attrGet("start") !== null) return [wanted("ol", { start: Number(token.attrGet("start")) })];
  const aligned = ALIGNED[token.attrGet("style")];
  return [wanted(ELEMENTS[name] ?? "span", aligned ? { className: aligned } : {})];
}

/** What a token without children is. */
function single(token) {
  switch (token.type) {
    case "text": case "text_special": return token.content;
    case "softbreak": case "hardbreak": return wanted("br");
    case "hr": return wanted("hr");
    case "code_inline": return wanted("code", {}, [token.content]);
    case "formula": return wanted("code", { className: "formula" }, [token.content]);
    case "formula_block": return wanted("pre", { className: "formula", tabIndex: 0, role: "group", ariaLabel: "Formula" }, [token.content]);
    case "fence": return codeBlock(token.content.replace(/\n$/, ""), token.info.trim().split(/\s+/)[0].slice(0, 40));
    case "code_block": return codeBlock(token.content.replace(/\n$/, ""), "");
    case "image": return image(token);
    default: return token.content;
  }
}

/** Where an image is. It is not loaded: its address would tell its server what the model has read. */
function image(token) {
  const address = token.attrGet("src"), label = `[image: ${token.content || address}]`;
  return LINK.test(address) ? wanted("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" }, [label]) : label;
}

function treeOf(tokens) {
  const root = [], into = [root];
  for (const token of tokens) {
    const here = into.at(-1);
    if (token.type === "inline") {
      for (const one of treeOf(token.children)) add(here, one);
    } else if (token.nesting > 0 && !token.hidden) {
      if (into.length > NESTED) {
        into.push(here);  // What is deeper is shown without a form of its own.
        continue;
      }
      const [node, inner = node] = opened(token);
      here.push(node);
      into.push(inner.children);
    } else if (token.nesting < 0 && !token.hidden) {
      into.pop();
    } else if (token.nesting === 0) {
      add(here, single(token));
    }
  }
  return root;
}

/** Pieces of text that touch are one; a box to tick is a sign. */
function add(children, one) {
  if (typeof one !== "string") children.push(one);
  else if (typeof children.at(-1) === "string") children[children.length - 1] += one;
  else if (one) children.push(one);
}

function ticked(tree) {
  for (const node of tree) {
    if (typeof node === "string") continue;
    ticked(node.children);
    if (node.tag !== "li") continue;
    const first = typeof node.children[0] === "string" ? node.children : node.children[0]?.tag === "p" ? node.children[0].children : [];
    if (typeof first[0] === "string") first[0] = first[0].replace(/^\[ \] /, "☐ ").replace(/^\[[xX]\] /, "☑ ");
  }
  return tree;
}

/** Blocks of a text, each with the offset at which it begins. refs: what other pieces say of links. */
function blocksOf(text, refs) {
  if (!text.trim()) return [];
  if (text.length > MOST) return [{ at: 0, node: bounded(text) }];
  const tokens = reader.parse(text, refs), blocks = [];
  const lines = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) lines.push(at + 1);
  for (let begin = 0, end; begin < tokens.length; begin = end) {
    let depth = 0, deepest = 0;
    for (end = begin; end < tokens.length; end += 1) {
      depth += tokens[end].nesting;
      deepest = Math.max(deepest, tokens[end].level);
      if (depth === 0) { end += 1; break; }
    }
    const [from, to] = tokens[begin].map, at = lines[from];
    const node = deepest >= NESTED - 2 ? plain(text.slice(at, lines[to] ?? text.length).trimEnd()) : ticked(treeOf(tokens.slice(begin, end)))[0];
    blocks.push({ at, node });
  }
  return blocks;
}

/** A piece too long to be read: code if it begins as code does, or else as it was typed. */
function bounded(text) {
  const fence = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*\n/.exec(text);
  if (!fence) return plain(text);
  return codeBlock(text.slice(fence[0].length).replace(new RegExp(`\\n {0,3}${fence[1]}\\s*$`), ""), fence[2]);
}

/** Cut a long text at empty lines outside code. */
function piecesOf(text) {
  if (text.length <= PIECE) return [text];
  const pieces = [];
  let begin = 0, fence = "";
  for (let at = 0, end; at < text.length; at = end) {
    end = text.indexOf("\n", at) + 1 || text.length;
    const line = text.slice(at, Math.min(end, at + 200)), mark = /^\s{0,3}(`{3,}|~{3,})/.exec(line)?.[1] ?? "";
    const closes = fence && mark[0] === fence[0] && mark.length >= fence.length && line.trim() === mark;
    if (!fence && mark && at - begin > PIECE / 2) {
      pieces.push(text.slice(begin, at));
      begin = at;
    }
    fence = closes ? "" : fence || mark;
    if ((closes || (!fence && !line.trim())) && end - begin >= PIECE) {
      pieces.push(text.slice(begin, end));
      begin = end;
    }
  }
  if (begin < text.length) pieces.push(text.slice(begin));
  return pieces;
}

// ---- from the tree to nodes

/** Bring children of a node up to date, from one of them on. What has not changed stays the node that it is, and what is selected there stays so. */
export function patch(parent, children, from = 0) {
  children.forEach((want, index) => {
    const have = parent.childNodes[from + index];
    if (typeof want === "string") {
      if (have?.nodeType !== Node.TEXT_NODE) place(parent, document.createTextNode(want), have);
      else if (want !== have.data) want.startsWith(have.data) ? have.appendData(want.slice(have.data.length)) : (have.data = want);
      return;
    }
    const same = have?.localName === want.tag && have.className === (want.properties.className ?? "");
    const node = same ? have : place(parent, document.createElement(want.tag), have);
    // An address reads otherwise than it was written.
    for (const [name, value] of Object.entries(want.properties)) if (name === "href" || node[name] !== value) node[name] = value;
    // A button says for a moment what it has done.
    if (want.tag !== "button" || !same) patch(node, want.children);
  });
  while (parent.childNodes.length > from + children.length) parent.lastChild.remove();
}

function place(parent, fresh, old) {
  if (old) old.replaceWith(fresh);
  else parent.append(fresh);
  return fresh;
}

/** A text that grows. Blocks before the last one cannot change with what is added, so only that is read again; at the end all is, as links may be explained below. */
export class Growing {
  constructor(node) {
    this.node = node;
    this.begin();
  }

  begin() {
    this.text = "";
    this.settled = 0;
    this.blocks = 0;
    this.refs = {};
  }

  show(said, whole = false) {
    const text = said.replace(/\r\n?/g, "\n");
    if (whole || !text.startsWith(this.text.slice(0, this.settled))) this.begin();
    this.text = text;
    const found = [];
    let at = this.settled;
    for (const piece of piecesOf(text.slice(at))) {
      for (const block of blocksOf(piece, this.refs)) found.push({ at: at + block.at, node: block.node });
      at += piece.length;
    }
    patch(this.node, found.map((block) => block.node), this.blocks);
    if (found.length > 1) {
      this.settled = found.at(-1).at;
      this.blocks += found.length - 1;
    }
  }
}
