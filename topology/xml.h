// SPDX-License-Identifier: Apache-2.0
// Parses the part of XML that hwloc writes: one tree of elements with attributes and text. Comments, processing
// instructions and a document type without an internal subset are skipped; the five named entities and numeric ones are
// known. Namespaces, CDATA and user-defined entities are not supported.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/base/status.h"

namespace moeccl::topology {

inline constexpr size_t kMaxXmlBytes = 64u << 20;
inline constexpr size_t kMaxXmlDepth = 256;

struct XmlElement {
  std::string name;
  std::vector<std::pair<std::string, std::string>> attributes;
  std::string text;  // all text directly inside the element, in order
  std::vector<XmlElement> children;
  uint32_t line = 0;  // line where the element begins, from 1

  const std::string* attribute(std::string_view wanted) const;  // null when there is none
};

// `file` is for errors, which read "file:line:column: ...".
Result<XmlElement> parse_xml(std::string_view text, const std::string& file);

// Returns text from a file in a form that fits into an error: one printable line of at most 40 characters.
std::string in_quotes(std::string_view text);

}  // namespace moeccl::topology
