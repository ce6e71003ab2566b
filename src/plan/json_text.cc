#include "src/plan/json_text.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace moeccl::plan {

namespace {

struct Place {
  uint32_t line = 1, column = 1;
};

// Where the reader stands, and where what it reads now began.
struct Cursor {
  Place at, start;
  bool between = true;  // two values: what comes next, but for space and what separates them, begins one

  void take(char c) {
    const bool separates = c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == ',' || c == ':';
    if (between && !separates) {
      start = at;
      between = false;
    }
    ++at.column;
    if (c == '\n') at = {at.line + 1, 1};
  }
  Place begun() const { return between ? at : start; }
};

// Shows the text to the reader and tells the cursor of each character.
class Characters {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  Characters() = default;
  Characters(const char* at, Cursor* cursor) : at_(at), cursor_(cursor) {}
  reference operator*() const { return *at_; }
  Characters& operator++() {
    cursor_->take(*at_++);
    return *this;
  }
  Characters operator++(int) {
    Characters before = *this;
    ++*this;
    return before;
  }
  bool operator==(const Characters& other) const { return at_ == other.at_; }
  bool operator!=(const Characters& other) const { return at_ != other.at_; }

 private:
  const char* at_ = nullptr;
  Cursor* cursor_ = nullptr;
};

// Receives what the library's reader finds, one call each (its names), and makes a Json of it. False ends the reading.
class Builder {
 public:
  Builder(const std::string& source, Cursor& cursor) : source_(source), cursor_(cursor) {}
  Result<Json> finish() && {
    if (!status_.ok()) return std::move(status_);
    return std::move(root_);
  }

  bool null() { return add(Json::Kind::kNull) != nullptr; }
  bool boolean(bool truth) {
    Json* const v = add(Json::Kind::kBool);
    if (v != nullptr) v->truth = truth;
    return v != nullptr;
  }
  bool number_integer(int64_t number) { return add_number(static_cast<double>(number)); }
  bool number_unsigned(uint64_t number) { return add_number(static_cast<double>(number)); }
  bool number_float(double number, const std::string&) { return add_number(number); }
  bool string(std::string& text) {
    Json* const v = add(Json::Kind::kText);
    if (v != nullptr) v->text = std::move(text);
    return v != nullptr;
  }
  bool binary(nlohmann::json::binary_t&) { return false; }  // JSON as text has none
  bool start_object(size_t) { return open(Json::Kind::kObject); }
  bool start_array(size_t) { return open(Json::Kind::kList); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    if (!open_.back().names.insert(name).second) return wrong(format("the field \"{}\" stands here twice", name));
    open_.back().value->fields.push_back({std::move(name), {}});
    cursor_.between = true;
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& e) {
    if (e.id == kNumberOverflow) return wrong("the number is too large or too small");
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ...": the place is ours.
    std::string what = e.what();
    if (const size_t at = what.find("parse error at "); at != std::string::npos)
      if (const size_t colon = what.find(": ", at); colon != std::string::npos) what.erase(0, colon + 2);
    for (char& c : what)
      if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
    return wrong(what.substr(0, 300));
  }

 private:
  static constexpr int kNumberOverflow = 406;  // json.exception.out_of_range.406
  struct Open {
    Json* value;
    std::unordered_set<std::string> names;
  };

  bool wrong(const std::string& what) {
    const Place p = cursor_.begun();
    status_ = error(moecclInvalidArgument, "{}:{}:{}: {}", source_, p.line, p.column, what);
    return false;
  }
  // The next value, in what is open; null: there are too many.
  Json* add(Json::Kind kind) {
    if (++n_values_ > kMaxJsonValues) {
      (void)wrong(format("more than {} values", kMaxJsonValues));
      return nullptr;
    }
    Json* v = &root_;
    if (!open_.empty()) {
      Json& in = *open_.back().value;
      v = in.kind == Json::Kind::kObject ? &in.fields.back().value : &in.items.emplace_back();
    }
    const Place p = cursor_.begun();
    v->kind = kind, v->line = p.line, v->column = p.column;
    cursor_.between = true;
    return v;
  }
  bool add_number(double number) {
    if (!std::isfinite(number)) return wrong("the number is too large or too small");
    Json* const v = add(Json::Kind::kNumber);
    if (v != nullptr) v->number = number;
    return v != nullptr;
  }
  bool open(Json::Kind kind) {
    if (open_.size() >= kMaxJsonDepth)
      return wrong(format("lists and objects stand in one another more than {} deep", kMaxJsonDepth));
    Json* const v = add(kind);
    if (v != nullptr) open_.push_back({v, {}});
    return v != nullptr;
  }
  bool close() {
    open_.pop_back();
    cursor_.between = true;
    return true;
  }

  const std::string& source_;
  Cursor& cursor_;
  Json root_;
  Status status_;
  size_t n_values_ = 0;
  std::vector<Open> open_;  // their values stay where they are: what encloses them does not grow meanwhile
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
  if (text.size() > kMaxJsonBytes)
    return error(moecclInvalidArgument, "{}: {} bytes: at most {} are read", source, text.size(), kMaxJsonBytes);
  Cursor cursor;
  Builder builder(source, cursor);
  (void)nlohmann::json::sax_parse(Characters(text.data(), &cursor), Characters(text.data() + text.size(), &cursor),
                                  &builder);
  return std::move(builder).finish();
}

Status json_error(const std::string& source, const Json& at, const std::string& what) {
  return error(moecclInvalidArgument, "{}:{}:{}: {}", source, at.line, at.column, what);
}

}  // namespace moeccl::plan
