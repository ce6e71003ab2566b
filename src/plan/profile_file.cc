// SPDX-License-Identifier: Apache-2.0
#include "src/plan/profile_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "src/plan/op.h"

namespace moeccl::plan {

namespace {

constexpr double kMaxFigure = 1e15;  // ns, bytes per ns, bytes
constexpr size_t kMaxPoints = 1024, kMaxPlans = 4096, kMaxFits = 64;
constexpr size_t kMaxValues = 1u << 19, kMaxFields = 64;
constexpr int kMaxDepth = 32;

using Json = nlohmann::ordered_json;  // in the file's order, so that a value can be found in the text again

enum class Kind : uint8_t { kOther, kBool, kNumber, kText, kList, kObject };
Kind kind_of(const Json& v) {
  return v.is_boolean()  ? Kind::kBool
         : v.is_number() ? Kind::kNumber
         : v.is_string() ? Kind::kText
         : v.is_array()  ? Kind::kList
         : v.is_object() ? Kind::kObject
                         : Kind::kOther;
}
const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"null", "true or false", "a number", "a text", "a list", "an object"};
  return kNames[static_cast<size_t>(kind)];
}

// Returns an error about key or value number `n` of the text, in textual order, or about whatever contains byte `byte`.
Status wrong_at(const std::string& source, std::string_view text, size_t n, size_t byte, const std::string& what) {
  size_t line = 1, line_start = 0, begin = 0;
  bool in_text = false, in_word = false;
  for (size_t i = 0, seen = 0; i < text.size() && seen <= n; ++i) {
    const char c = text[i];
    const bool separates = c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == ',' || c == ':';
    if (!in_text && !in_word && !separates) {
      begin = i - line_start;
      seen += c != '}' && c != ']';
      if (seen > n) break;
    }
    if (in_text) {
      if (c == '\\') ++i;
      in_text = c != '"';
    } else {
      in_text = c == '"';
      in_word = !in_text && !separates && std::string_view("{}[]").find(c) == std::string_view::npos;
    }
    if (i >= byte && !separates) break;
    if (!in_text && !in_word) begin = i + 1 - line_start;
    if (c == '\n') {
      ++line;
      line_start = i + 1;
      begin = 0;
    }
  }
  return error(moecclInvalidArgument, "{}:{}:{}: {}", source, line, begin + 1, what);
}

// Counts the keys and values before `wanted`.
bool count_before(const Json& in, const Json& wanted, size_t* n) {
  if (&in == &wanted) return true;
  ++*n;
  for (const auto& item : in.items()) {
    *n += in.is_object();
    if (in.is_structured() && count_before(item.value(), wanted, n)) return true;
  }
  return false;
}

Result<Json> parse(std::string_view text, const std::string& source) {
  if (text.size() > kMaxProfileBytes)
    return error(moecclInvalidArgument, "{}: {} bytes: at most {} are read", source, text.size(), kMaxProfileBytes);
  size_t n = 0;
  Status status;  // the first mistake that is not one of syntax
  std::vector<std::unordered_set<std::string>> names;
  const auto refuse = [&](const std::string& what) {
    if (status.ok()) status = wrong_at(source, text, n, text.size(), what);
  };
  const auto see = [&](int depth, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if (event == Event::array_end || event == Event::object_end) return true;
    if (event == Event::key) {
      names.resize(static_cast<size_t>(depth) + 1);
      const auto& name = parsed.get_ref<const std::string&>();
      if (!names.back().insert(name).second) refuse(format("the field \"{}\" appears twice here", name));
      // The library searches an object's fields one by one. With this many, at least one is unknown and gets reported.
      if (names.back().size() > kMaxFields) return false;
    } else if (event == Event::object_start) {
      names.resize(static_cast<size_t>(depth) + 1);
    }
    if (depth >= kMaxDepth && event != Event::value)
      refuse(format("lists and objects are nested more than {} deep", kMaxDepth));
    if (n++ == kMaxValues) refuse(format("more than {} values", kMaxValues));
    return status.ok();
  };
  Json root;
  try {
    root = Json::parse(text.begin(), text.end(), see);
  } catch (const Json::parse_error& e) {
    MOECCL_TRY(status);
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while ...": we report our own
    // position.
    std::string what = e.what();
    if (const size_t at = what.find("parse error at "); at != std::string::npos)
      if (const size_t colon = what.find(": ", at); colon != std::string::npos) what.erase(0, colon + 2);
    for (char& c : what)
      if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
    return wrong_at(source, text, SIZE_MAX, e.byte > 0 ? e.byte - 1 : 0, what.substr(0, 300));
  } catch (const Json::out_of_range&) {
    MOECCL_TRY(status);
    return wrong_at(source, text, n, text.size(), "the number is too large or too small");
  }
  MOECCL_TRY(status);
  return root;
}

struct NumberField {
  const char* name;
  double Profile::*member;
  bool positive;  // a rate; otherwise a time, which may be 0
};
constexpr NumberField kMachine[] = {
    {"copy_bytes_per_ns", &Profile::copy_bytes_per_ns, true},
    {"stream_bytes_per_ns", &Profile::stream_bytes_per_ns, true},
    {"cached_copy_bytes_per_ns", &Profile::cached_copy_bytes_per_ns, true},
    {"reduce_bytes_per_ns", &Profile::reduce_bytes_per_ns, true},
    {"cached_reduce_bytes_per_ns", &Profile::cached_reduce_bytes_per_ns, true},
    {"encode_bytes_per_ns", &Profile::encode_bytes_per_ns, true},
    {"decode_bytes_per_ns", &Profile::decode_bytes_per_ns, true},
    {"read_bytes_per_ns", &Profile::read_bytes_per_ns, true},
    {"read_call_ns", &Profile::read_call_ns, false},
    {"host_copy_bytes_per_ns", &Profile::host_copy_bytes_per_ns, true},
    {"signal_ns", &Profile::signal_ns, false},
    {"step_ns", &Profile::step_ns, false},
    {"start_ns", &Profile::start_ns, false},
    {"switch_ns", &Profile::switch_ns, false},
};

std::string number_text(double v) {
  char text[40];
  const auto [end, code] = std::to_chars(text, text + sizeof(text), v);
  return code == std::errc() ? std::string(text, end) : "0";
}

std::string fit_text(const AllToAllCosts::Fit& fit) {
  const std::string r2 = fit.r2 > 0 ? format(", \"r2\": {}", number_text(fit.r2)) : "";
  return format("{{\"alpha_ns\": {}, \"bytes_per_ns\": {}{}}}", number_text(fit.alpha_ns),
                number_text(fit.bytes_per_ns), r2);
}

std::string curve_text(const Curve& curve) {
  std::string text =
      format("\"alpha_ns\": {}, \"bytes_per_ns\": {}, \"r2\": {}, \"points\": [", number_text(curve.line.alpha_ns),
             number_text(curve.line.bytes_per_ns), number_text(curve.r2));
  for (size_t i = 0; i < curve.points.size(); ++i) {
    const Curve::Point& p = curve.points[i];
    text += format("{}[{}, {}", i ? ", " : "", number_text(p.bytes), number_text(p.ns));
    if (p.high_ns > 0) text += format(", {}", number_text(p.high_ns));
    text += "]";
  }
  return text + "]";
}

class ProfileReader {
 public:
  ProfileReader(const std::string& source, std::string_view text, const Json& root, const Profile& base)
      : source_(source), text_(text), root_(root), p_(base) {}

  Result<Profile> read() {
    MOECCL_TRY(expect(root_, Kind::kObject, "the profile"));
    const auto version = root_.find("moeccl_profile");
    if (version == root_.end()) return wrong(root_, "no field \"moeccl_profile\": this is not a profile");
    if (!version->is_number() || version->get<double>() != kProfileVersion)
      return wrong(*version, format("the profile's version must be {}", kProfileVersion));
    for (const auto& [name, value] : root_.items()) MOECCL_TRY(field(name, value));
    return std::move(p_);
  }

 private:
  Status wrong(const Json& v, const std::string& what) const {
    size_t n = 0;
    (void)count_before(root_, v, &n);
    return wrong_at(source_, text_, n, text_.size(), what);
  }
  Status expect(const Json& v, Kind kind, const std::string& what) const {
    if (kind_of(v) == kind) return {};
    return wrong(v, format("{} must be {}, not {}", what, kind_name(kind), kind_name(kind_of(v))));
  }
  Status number(const Json& v, const std::string& what, double least, double* out) const {
    MOECCL_TRY(expect(v, Kind::kNumber, what));
    const auto n = v.get<double>();
    if (!(n >= least && n <= kMaxFigure))
      return wrong(v, format("{} is {}: {} to {} are possible", what, number_text(n), number_text(least),
                             number_text(kMaxFigure)));
    *out = n;
    return {};
  }
  template <class T>
  Status integer(const Json& v, const std::string& what, double least, double most, T* out) const {
    MOECCL_TRY(expect(v, Kind::kNumber, what));
    const auto n = v.get<double>();
    if (!(n >= least && n <= most) || n != std::floor(n))
      return wrong(v, format("{} is {}: a whole number from {} to {} is possible", what, number_text(n),
                             number_text(least), number_text(most)));
    *out = static_cast<T>(n);
    return {};
  }
  Status text(const Json& v, const std::string& what, std::string* out) const {
    MOECCL_TRY(expect(v, Kind::kText, what));
    *out = v.get<std::string>();
    return {};
  }
  Status unknown(const std::string& name, const Json& v, const char* known) const {
    return wrong(v, format("unknown field \"{}\": there are {}", name.substr(0, 64), known));
  }

  Status field(const std::string& name, const Json& v) {
    std::string ignored;
    if (name == "moeccl_profile") return {};
    if (name == "note" || name == "topology" || name == "units") return text(v, name, &ignored);
    if (name == "n_ranks") return integer(v, name, 0, kMaxRanks, &p_.n_ranks);
    if (name == "topology_hash") return hash(v);
    if (name == "machine") return machine(v);
    if (name == "levels") return levels(v);
    if (name == "alltoall") return all_to_all(v);
    if (name == "plans") return plans(v);
    return unknown(name, v,
                   "moeccl_profile, note, units, topology, topology_hash, n_ranks, machine, levels, alltoall, plans");
  }

  Status hash(const Json& v) {
    MOECCL_TRY(expect(v, Kind::kText, "topology_hash"));
    const auto digits = v.get<std::string>();
    const char* end = digits.data() + digits.size();
    const auto [at, code] = std::from_chars(digits.data(), end, p_.tree_hash, 16);
    if (code == std::errc() && at == end) return {};
    return wrong(v, "topology_hash must be up to 16 hexadecimal digits");
  }

  Status machine(const Json& v) {
    MOECCL_TRY(expect(v, Kind::kObject, "machine"));
    for (const auto& item : v.items()) {
      const std::string& name = item.key();
      const Json& value = item.value();
      const auto* known =
          std::find_if(std::begin(kMachine), std::end(kMachine), [&](const NumberField& f) { return name == f.name; });
      if (known != std::end(kMachine)) {
        MOECCL_TRY(number(value, name, known->positive ? 1e-9 : 0, &(p_.*(known->member))));
      } else if (name == "cache_bytes") {
        MOECCL_TRY(integer(value, name, 0, kMaxFigure, &p_.cache_bytes));
      } else if (name == "stream_from_bytes") {
        MOECCL_TRY(integer(value, name, 0, kMaxFigure, &p_.stream_from_bytes));
      } else if (name == "cores") {
        MOECCL_TRY(integer(value, name, 1, 1 << 20, &p_.cores));
      } else if (name == "host_level") {
        MOECCL_TRY(integer(value, name, -1, 64, &p_.host_level));
      } else {
        std::string all;
        for (const NumberField& f : kMachine) all += format("{}, ", f.name);
        return unknown(name, value, (all + "cache_bytes, stream_from_bytes, cores, host_level").c_str());
      }
    }
    return {};
  }

  Status fit(const Json& v, const std::string& what, AllToAllCosts::Fit* out) {
    MOECCL_TRY(expect(v, Kind::kObject, what));
    for (const auto& [name, value] : v.items()) {
      if (name == "alpha_ns")
        MOECCL_TRY(number(value, name, 0, &out->alpha_ns));
      else if (name == "bytes_per_ns")
        MOECCL_TRY(number(value, name, 0, &out->bytes_per_ns));
      else if (name == "r2")
        MOECCL_TRY(share(value, &out->r2));
      else
        return unknown(name, value, "alpha_ns, bytes_per_ns, r2");
    }
    return {};
  }

  Status share(const Json& v, double* r2) {
    MOECCL_TRY(number(v, "r2", 0, r2));
    return *r2 > 1 ? wrong(v, "r2 is at most 1") : Status();
  }

  // Reads one field of a curve; *taken says whether it was one.
  Status curve(const std::string& name, const Json& v, Curve* out, bool* taken) {
    *taken = true;
    if (name == "alpha_ns") return number(v, name, 0, &out->line.alpha_ns);
    if (name == "bytes_per_ns") return number(v, name, 0, &out->line.bytes_per_ns);
    if (name == "r2") return share(v, &out->r2);
    *taken = name == "points";
    return *taken ? points(v, out) : Status();
  }

  Status points(const Json& v, Curve* out) {
    MOECCL_TRY(expect(v, Kind::kList, "points"));
    if (v.size() > kMaxPoints) return wrong(v, format("more than {} points", kMaxPoints));
    for (const Json& item : v) {
      MOECCL_TRY(expect(item, Kind::kList, "a point"));
      if (item.size() != 2 && item.size() != 3)
        return wrong(item, "a point is [bytes, ns] or [bytes, ns, upper quartile in ns]");
      Curve::Point p;
      MOECCL_TRY(number(item[0], "a point's bytes", 0, &p.bytes));
      MOECCL_TRY(number(item[1], "a point's ns", 1e-3, &p.ns));
      if (item.size() == 3) {
        MOECCL_TRY(number(item[2], "a point's upper quartile", 1e-3, &p.high_ns));
        if (p.high_ns < p.ns) return wrong(item[2], "an upper quartile is not below its median");
      }
      if (!out->points.empty() && p.bytes <= out->points.back().bytes)
        return wrong(item, "points must ascend in bytes");
      out->points.push_back(p);
    }
    return {};
  }

  Status levels(const Json& v) {
    MOECCL_TRY(expect(v, Kind::kList, "levels"));
    if (v.size() > kMaxFits) return wrong(v, format("more than {} levels", kMaxFits));
    for (const Json& item : v) {
      MOECCL_TRY(expect(item, Kind::kObject, "a level"));
      LevelFit fit;
      for (const auto& [name, value] : item.items()) {
        bool taken = false;
        MOECCL_TRY(curve(name, value, &fit.curve, &taken));
        if (taken) continue;
        if (name != "name") return unknown(name, value, "name, alpha_ns, bytes_per_ns, r2, points");
        MOECCL_TRY(text(value, "name", &fit.name));
      }
      p_.links.push_back(fit.curve.line);
      p_.levels.push_back(std::move(fit));
    }
    return {};
  }

  Status all_to_all(const Json& v) {
    MOECCL_TRY(expect(v, Kind::kObject, "alltoall"));
    for (const auto& [name, value] : v.items()) {
      if (name == "standard") {
        MOECCL_TRY(fit(value, name, &p_.all_to_all.standard));
        continue;
      }
      if (name != "inter" && name != "intra") return unknown(name, value, "standard, inter, intra");
      std::vector<AllToAllCosts::Fit>& list = name == "inter" ? p_.all_to_all.inter : p_.all_to_all.intra;
      MOECCL_TRY(expect(value, Kind::kList, name));
      if (value.size() > kMaxFits) return wrong(value, format("more than {} entries", kMaxFits));
      for (const Json& item : value) MOECCL_TRY(fit(item, name, &list.emplace_back()));
    }
    return {};
  }

  Status plans(const Json& v) {
    MOECCL_TRY(expect(v, Kind::kList, "plans"));
    if (v.size() > kMaxPlans) return wrong(v, format("more than {} plans", kMaxPlans));
    for (const Json& item : v) {
      MOECCL_TRY(expect(item, Kind::kObject, "a plan"));
      PlanFit fit;
      bool has_op = false;
      for (const auto& [name, value] : item.items()) {
        bool taken = false;
        MOECCL_TRY(curve(name, value, &fit.curve, &taken));
        if (taken) continue;
        if (name == "op") {
          MOECCL_TRY(op(value, &fit.op));
          has_op = true;
        } else if (name == "algorithm") {
          MOECCL_TRY(text(value, name, &fit.algorithm));
        } else if (name == "reach") {
          MOECCL_TRY(integer(value, name, 0, 7, &fit.reach));
        } else if (name == "correction") {
          continue;  // of earlier versions
        } else {
          return unknown(name, value, "op, algorithm, reach, alpha_ns, bytes_per_ns, r2, points");
        }
      }
      if (!has_op || fit.algorithm.empty()) return wrong(item, "a plan needs \"op\" and \"algorithm\"");
      if (!fit.curve.known()) return wrong(item, "a plan needs \"points\"");
      if (p_.find_plan(fit.op, fit.algorithm, fit.reach) != nullptr)
        return wrong(item, format("{}:{} with this reach appears twice", op_title(fit.op), fit.algorithm));
      p_.plans.push_back(std::move(fit));
    }
    return {};
  }

  Status op(const Json& v, moecclOp_t* out) {
    MOECCL_TRY(expect(v, Kind::kText, "op"));
    std::string known;
    for (int i = 0; i < MOECCL_NUM_OPS; ++i) {
      const auto candidate = static_cast<moecclOp_t>(i);
      if (v == op_title(candidate)) {
        *out = candidate;
        return {};
      }
      known += format("{}{}", i ? ", " : "", op_title(candidate));
    }
    return wrong(v, format("unknown operation: there are {}", known));
  }

  const std::string& source_;
  std::string_view text_;
  const Json& root_;
  Profile p_;
};

}  // namespace

std::string write_profile(const Profile& p, const std::string& note, const std::string& topology) {
  std::string t = format("{{\n  \"moeccl_profile\": {},\n", kProfileVersion);
  t += "  \"units\": \"ns; bytes; bytes_per_ns = GB/s of 1e9 bytes; points are [bytes, ns, upper quartile]\",\n";
  if (!note.empty()) t += format("  \"note\": {},\n", json_quoted(note));
  if (!topology.empty()) t += format("  \"topology\": {},\n", json_quoted(topology));
  t += format("  \"topology_hash\": \"{:016x}\",\n  \"n_ranks\": {},\n  \"machine\": {{\n", p.tree_hash, p.n_ranks);
  for (const NumberField& f : kMachine) t += format("    \"{}\": {},\n", f.name, number_text(p.*(f.member)));
  t += format(
      "    \"cache_bytes\": {},\n    \"stream_from_bytes\": {},\n    \"cores\": {},\n    \"host_level\": {}\n  }}",
      p.cache_bytes, p.stream_from_bytes, p.cores, p.host_level);
  if (p.all_to_all.standard.bytes_per_ns > 0 || !p.all_to_all.inter.empty() || !p.all_to_all.intra.empty()) {
    t += format(",\n  \"alltoall\": {{\n    \"standard\": {}", fit_text(p.all_to_all.standard));
    const auto list = [&](const char* name, const std::vector<AllToAllCosts::Fit>& all) {
      t += format(",\n    \"{}\": [", name);
      for (size_t i = 0; i < all.size(); ++i) t += format("{}{}", i ? ", " : "", fit_text(all[i]));
      t += "]";
    };
    list("inter", p.all_to_all.inter);
    list("intra", p.all_to_all.intra);
    t += "\n  }";
  }
  const auto entries = [&](const char* name, size_t n, auto&& entry) {
    t += format(",\n  \"{}\": [", name);
    for (size_t i = 0; i < n; ++i) t += format("{}\n    {{{}}}", i ? "," : "", entry(i));
    t += n > 0 ? "\n  ]" : "]";
  };
  entries("levels", p.levels.size(), [&](size_t i) {
    return format("\"name\": {}, {}", json_quoted(p.levels[i].name), curve_text(p.levels[i].curve));
  });
  entries("plans", p.plans.size(), [&](size_t i) {
    const PlanFit& f = p.plans[i];
    return format("\"op\": {}, \"algorithm\": {}, \"reach\": {}, {}", json_quoted(op_title(f.op)),
                  json_quoted(f.algorithm), int{f.reach}, curve_text(f.curve));
  });
  return t + "\n}\n";
}

Result<Profile> read_profile(std::string_view text, const std::string& source, const Profile& base) {
  MOECCL_ASSIGN_OR_RETURN(const Json root, parse(text, source));
  return ProfileReader(source, text, root, base).read();
}

Status profile_fits(const Profile& p, const LevelTree& tree) {
  if (!p.levels.empty() && p.levels.size() != tree.depth())
    return error(moecclInvalidArgument, "the profile has {} levels, the topology {}", p.levels.size(), tree.depth());
  for (uint32_t l = 0; l < p.levels.size(); ++l) {
    if (p.levels[l].name != tree.levels[l].name)
      return error(moecclInvalidArgument, "level {} is \"{}\" in the profile, \"{}\" in the topology", l,
                   p.levels[l].name, tree.levels[l].name);
  }
  return {};
}

}  // namespace moeccl::plan
