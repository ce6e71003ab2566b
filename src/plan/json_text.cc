#include "src/plan/json_text.h"

#include <charconv>
#include <cmath>

namespace moeccl::plan {

namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_utf8(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xc0 | (code >> 6));
    text += static_cast<char>(0x80 | (code & 0x3f));
  } else {
    text += static_cast<char>(0xe0 | (code >> 12));
    text += static_cast<char>(0x80 | ((code >> 6) & 0x3f));
    text += static_cast<char>(0x80 | (code & 0x3f));
  }
}

class JsonParser {
 public:
  JsonParser(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  Result<Json> document() {
    if (text_.size() > kMaxJsonBytes)
      return error(moecclInvalidArgument, "{}: {} bytes: at most {} are read", source_, text_.size(), kMaxJsonBytes);
    Json root;
    MOECCL_TRY(value(root, 0));
    skip_space();
    if (at_ < text_.size()) return wrong("expected the end of the file");
    return root;
  }

 private:
  Status wrong(const char* what) const {
    if (at_ >= text_.size())
      return error(moecclInvalidArgument, "{}:{}:{}: {}, but the file ends", source_, line_, column(), what);
    const auto c = static_cast<unsigned char>(text_[at_]);
    return error(moecclInvalidArgument, "{}:{}:{}: {}, not {}", source_, line_, column(), what,
                 c >= 0x20 && c < 0x7f ? format("'{}'", text_[at_]) : format("byte {}", int{c}));
  }
  uint32_t column() const { return static_cast<uint32_t>(at_ - line_start_ + 1); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool accept(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void skip_space() {
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') {
        ++line_;
        line_start_ = at_ + 1;
      } else if (c != ' ' && c != '\t' && c != '\r') {
        return;
      }
    }
  }

  Status value(Json& out, uint32_t depth) {
    skip_space();
    out.line = line_;
    out.column = column();
    if (depth >= kMaxJsonDepth) return wrong("expected a value that is nested less deeply");
    const char c = peek();
    if (c == '{') return object(out, depth);
    if (c == '[') return list(out, depth);
    if (c == '"') {
      out.kind = Json::Kind::kText;
      return string(out.text);
    }
    if (c == '-' || is_digit(c)) return number(out);
    if (word("true")) {
      out.kind = Json::Kind::kBool;
      out.truth = true;
      return {};
    }
    if (word("false")) {
      out.kind = Json::Kind::kBool;
      return {};
    }
    if (word("null")) return {};
    return wrong("expected a value");
  }

  bool word(std::string_view w) {
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }

  Status object(Json& out, uint32_t depth) {
    out.kind = Json::Kind::kObject;
    ++at_;
    skip_space();
    if (accept('}')) return {};
    do {
      skip_space();
      if (peek() != '"') return wrong("expected a field's name in quotes");
      const uint32_t line = line_, col = column();
      std::string name;
      MOECCL_TRY(string(name));
      if (out.find(name) != nullptr)
        return error(moecclInvalidArgument, "{}:{}:{}: the field \"{}\" stands here twice", source_, line, col, name);
      skip_space();
      if (!accept(':')) return wrong("expected ':' after a field's name");
      out.fields.push_back({std::move(name), {}});
      MOECCL_TRY(value(out.fields.back().value, depth + 1));
      skip_space();
    } while (accept(','));
    if (!accept('}')) return wrong("expected ',' or '}'");
    return {};
  }

  Status list(Json& out, uint32_t depth) {
    out.kind = Json::Kind::kList;
    ++at_;
    skip_space();
    if (accept(']')) return {};
    do {
      out.items.emplace_back();
      MOECCL_TRY(value(out.items.back(), depth + 1));
      skip_space();
    } while (accept(','));
    if (!accept(']')) return wrong("expected ',' or ']'");
    return {};
  }

  Status string(std::string& out) {
    ++at_;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (static_cast<unsigned char>(c) < 0x20) return wrong("expected the end of a text in quotes");
      ++at_;
      if (c == '"') return {};
      if (c != '\\') {
        out += c;
        continue;
      }
      MOECCL_TRY(escape(out));
    }
    return wrong("expected the end of a text in quotes");
  }

  Status escape(std::string& out) {
    constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (const size_t i = at_ < text_.size() ? kNames.find(text_[at_]) : std::string_view::npos;
        i != std::string_view::npos) {
      out += kMeanings[i];
      ++at_;
      return {};
    }
    if (!accept('u')) return wrong("expected one of \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\u");
    uint32_t code = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (failure != std::errc() || end != digits.data() + 4) return wrong("expected four hexadecimal digits");
    at_ += 4;
    append_utf8(out, code);
    return {};
  }

  Status number(Json& out) {
    const size_t start = at_;
    accept('-');
    if (!is_digit(peek())) return wrong("expected a digit");
    if (!accept('0')) {
      while (is_digit(peek())) ++at_;
    }
    if (accept('.')) {
      if (!is_digit(peek())) return wrong("expected a digit");
      while (is_digit(peek())) ++at_;
    }
    if (accept('e') || accept('E')) {
      if (!accept('-')) accept('+');
      if (!is_digit(peek())) return wrong("expected a digit");
      while (is_digit(peek())) ++at_;
    }
    out.kind = Json::Kind::kNumber;
    const auto [end, failure] = std::from_chars(text_.data() + start, text_.data() + at_, out.number);
    if (failure != std::errc() || !std::isfinite(out.number))
      return json_error(source_, out, "the number is too large or too small");
    return {};
  }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0, line_start_ = 0;
  uint32_t line_ = 1;
};

}  // namespace

const Json* Json::find(std::string_view name) const {
  for (const auto& [field, value] : fields)
    if (field == name) return &value;
  return nullptr;
}

const char* json_kind_name(Json::Kind kind) {
  constexpr const char* kNames[] = {"null", "true or false", "a number", "a text", "a list", "an object"};
  return kNames[static_cast<size_t>(kind)];
}

Result<Json> parse_json(std::string_view text, const std::string& source) {
  return JsonParser(text, source).document();
}

Status json_error(const std::string& source, const Json& at, const std::string& what) {
  return error(moecclInvalidArgument, "{}:{}:{}: {}", source, at.line, at.column, what);
}

}  // namespace moeccl::plan
