// SPDX-License-Identifier: Apache-2.0
#include "topology/xml.h"

#include <charconv>

namespace moeccl::topology {

namespace {

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' ||
         c == ':' || c == '.';
}

class XmlParser {
 public:
  XmlParser(std::string_view text, const std::string& file) : text_(text), file_(file) {}

  Result<XmlElement> document() {
    if (text_.size() > kMaxXmlBytes)
      return error(moecclInvalidArgument, "{}: {} bytes, at most {} are possible", file_, text_.size(), kMaxXmlBytes);
    MOECCL_TRY(skip_outside());
    if (done()) return wrong("an element such as <topology>");
    XmlElement root;
    MOECCL_TRY(tree(root));
    MOECCL_TRY(skip_outside());
    if (!done()) return wrong("the end of the file");
    return root;
  }

 private:
  bool done() const { return at_ >= text_.size(); }
  bool ahead(std::string_view what) const { return text_.substr(at_).starts_with(what); }

  Status wrong_at(size_t at, std::string_view wanted) const {
    size_t line = 1, start = 0;
    for (size_t i = 0; i < at && i < text_.size(); ++i)
      if (text_[i] == '\n') ++line, start = i + 1;
    const std::string found = at < text_.size() ? in_quotes(text_.substr(at, 24)) : "the end";
    return error(moecclInvalidArgument, "{}:{}:{}: found {}, wanted {}", file_, line, at - start + 1, found, wanted);
  }
  Status wrong(std::string_view wanted) const { return wrong_at(at_, wanted); }

  // Advances and counts lines.
  void step(size_t n) {
    for (; n > 0 && at_ < text_.size(); --n) line_ += text_[at_++] == '\n';
  }
  void skip_space() {
    while (!done() && is_space(text_[at_])) step(1);
  }
  Status skip_past(std::string_view end, size_t from, std::string_view what) {
    const size_t found = text_.find(end, at_);
    if (found == std::string_view::npos) return wrong_at(from, format("the end of this {}", what));
    step(found + end.size() - at_);
    return {};
  }

  // Skips comments and instructions; *moved tells whether there was one.
  Status skip_markup(bool* moved) {
    const size_t from = at_;
    *moved = true;
    if (ahead("<!--")) return step(4), skip_past("-->", from, "comment");
    if (ahead("<?")) return step(2), skip_past("?>", from, "instruction");
    *moved = false;
    return {};
  }
  Status skip_outside() {
    for (bool moved = true; moved;) {
      skip_space();
      MOECCL_TRY(skip_markup(&moved));
      if (moved || !ahead("<!DOCTYPE")) continue;
      const size_t from = at_, close = text_.find('>', at_);
      if (text_.substr(at_, close == std::string_view::npos ? close : close - at_).find('[') != std::string_view::npos)
        return wrong_at(from, "a document type without definitions inside");
      MOECCL_TRY(skip_past(">", from, "document type"));
      moved = true;
    }
    return {};
  }

  // Works without recursion, so that depth costs no stack here. Pointers into the parents stay valid, because a
  // parent's list grows only while none of its children is open.
  Status tree(XmlElement& root) {
    bool closed = false;
    MOECCL_TRY(open_tag(root, &closed));
    std::vector<XmlElement*> open;
    if (!closed) open.push_back(&root);
    while (!open.empty()) {
      XmlElement& now = *open.back();
      MOECCL_TRY(characters(now.text, '<'));
      if (done()) return wrong(format("</{}>, opened in line {}", now.name, now.line));
      bool moved = false;
      MOECCL_TRY(skip_markup(&moved));
      if (moved) continue;
      if (ahead("</")) {
        MOECCL_TRY(close_tag(now));
        open.pop_back();
        continue;
      }
      if (open.size() >= kMaxXmlDepth) return wrong(format("at most {} elements within one another", kMaxXmlDepth));
      now.children.emplace_back();
      MOECCL_TRY(open_tag(now.children.back(), &closed));
      if (!closed) open.push_back(&now.children.back());
    }
    return {};
  }

  Status name(std::string& out, std::string_view what) {
    const size_t from = at_;
    while (!done() && is_name(text_[at_])) ++at_;
    if (at_ == from || at_ - from > 256) return wrong_at(from, what);
    out = std::string(text_.substr(from, at_ - from));
    return {};
  }

  Status open_tag(XmlElement& element, bool* closed) {
    if (done() || text_[at_] != '<') return wrong("\"<\" and an element's name");
    element.line = line_;
    ++at_;
    MOECCL_TRY(name(element.name, "an element's name"));
    for (;;) {
      const bool spaced = !done() && is_space(text_[at_]);
      skip_space();
      if (ahead(">") || ahead("/>")) {
        *closed = ahead("/>");
        step(*closed ? 2 : 1);
        return {};
      }
      if (!spaced) return wrong("a space, \">\" or \"/>\"");
      MOECCL_TRY(attribute(element));
    }
  }

  Status attribute(XmlElement& element) {
    const size_t from = at_;
    std::string key, value;
    MOECCL_TRY(name(key, "an attribute, \">\" or \"/>\""));
    if (element.attribute(key) != nullptr) return wrong_at(from, "each attribute once");
    if (element.attributes.size() >= 64) return wrong_at(from, "at most 64 attributes");
    skip_space();
    if (!ahead("=")) return wrong("\"=\"");
    step(1);
    skip_space();
    if (!ahead("\"") && !ahead("'")) return wrong("a value in quotes");
    const char quote = text_[at_];
    const size_t start = at_++;
    MOECCL_TRY(characters(value, quote));
    if (done()) return wrong_at(start, "the end of this value");
    ++at_;
    element.attributes.emplace_back(std::move(key), std::move(value));
    return {};
  }

  Status close_tag(const XmlElement& element) {
    const size_t from = at_;
    at_ += 2;
    std::string found;
    MOECCL_TRY(name(found, format("</{}>", element.name)));
    if (found != element.name) return wrong_at(from, format("</{}>, opened in line {}", element.name, element.line));
    skip_space();
    if (!ahead(">")) return wrong("\">\"");
    step(1);
    return {};
  }

  // Reads up to the character `end` and replaces entities.
  Status characters(std::string& out, char end) {
    while (!done() && text_[at_] != end) {
      const char c = text_[at_];
      if (end != '<' && c == '<') return wrong("no \"<\" within a value");
      if (c == '&') {
        MOECCL_TRY(entity(out));
        continue;
      }
      if (static_cast<unsigned char>(c) < 0x20 && !is_space(c)) return wrong("no control characters");
      out += c;
      step(1);
    }
    return {};
  }

  Status entity(std::string& out) {
    constexpr std::pair<std::string_view, char> kNamed[] = {
        {"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}, {"&apos;", '\''}};
    for (const auto& [text, c] : kNamed) {
      if (!ahead(text)) continue;
      out += c;
      at_ += text.size();
      return {};
    }
    const size_t from = at_, end = text_.substr(at_, 12).find(';');
    const bool hex = ahead("&#x");
    const size_t skip = hex ? 3 : 2;
    uint32_t code = 0;
    if (!ahead("&#") || end == std::string_view::npos || end <= skip)
      return wrong_at(from, "&lt; &gt; &amp; &quot; &apos; or &#number;");
    const char* last = text_.data() + at_ + end;
    const auto [stop, bad] = std::from_chars(text_.data() + at_ + skip, last, code, hex ? 16 : 10);
    if (bad != std::errc() || stop != last || code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
      return wrong_at(from, "the number of a character");
    append_utf8(out, code);
    at_ += end + 1;
    return {};
  }

  static void append_utf8(std::string& out, uint32_t code) {
    const auto byte = [&](uint32_t value) { out += static_cast<char>(value); };
    if (code < 0x80) return byte(code);
    if (code < 0x800) {
      byte(0xc0 | code >> 6);
    } else if (code < 0x10000) {
      byte(0xe0 | code >> 12);
      byte(0x80 | (code >> 6 & 0x3f));
    } else {
      byte(0xf0 | code >> 18);
      byte(0x80 | (code >> 12 & 0x3f));
      byte(0x80 | (code >> 6 & 0x3f));
    }
    byte(0x80 | (code & 0x3f));
  }

  std::string_view text_;
  const std::string& file_;
  size_t at_ = 0;
  uint32_t line_ = 1;
};

}  // namespace

const std::string* XmlElement::attribute(std::string_view wanted) const {
  for (const auto& [key, value] : attributes)
    if (key == wanted) return &value;
  return nullptr;
}

Result<XmlElement> parse_xml(std::string_view text, const std::string& file) {
  return XmlParser(text, file).document();
}

std::string in_quotes(std::string_view text) {
  std::string shown(text.substr(0, 40));
  for (char& c : shown)
    if (c < ' ' || c > '~') c = '?';
  return "\"" + shown + (text.size() > 40 ? "...\"" : "\"");
}

}  // namespace moeccl::topology
