// Reads JSON and remembers where everything stood, so that what is wrong with a file can be said with line and column.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"

namespace moeccl::plan {

struct Json {
  struct Field;
  enum class Kind : uint8_t { kNull, kBool, kNumber, kText, kList, kObject };
  Kind kind = Kind::kNull;
  bool truth = false;
  double number = 0;
  std::string text;
  std::vector<Json> items;
  std::vector<Field> fields;      // in the file's order, names are distinct
  uint32_t line = 1, column = 1;  // of its first character, from 1

  // Null when there is none.
  const Json* find(std::string_view name) const;
};
struct Json::Field {
  std::string name;
  Json value;
};
const char* json_kind_name(Json::Kind kind);  // "a number"

// Ten times what calibration writes on the widest topology.
inline constexpr size_t kMaxJsonBytes = 4u << 20, kMaxJsonValues = 1u << 19;
inline constexpr size_t kMaxJsonDepth = 32;

// `source` names the file in errors: "profile.json:3:14: syntax error while parsing ...".
Result<Json> parse_json(std::string_view text, const std::string& source);
// The error "source:line:column: ..." for a value.
Status json_error(const std::string& source, const Json& at, const std::string& what);

}  // namespace moeccl::plan
