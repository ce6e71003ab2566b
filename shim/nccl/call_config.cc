// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/call_config.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string_view>

#include "shim/nccl/device.h"
#include "shim/nccl/group.h"

namespace moeccl::shim {
namespace {

constexpr size_t kLeastSize = offsetof(ncclCollConfig_t, userProfilerTag);  // the size in the first version
constexpr size_t kMostOptions = 1024;                                       // a longer list must be circular

bool given(int value) { return value != NCCL_CONFIG_UNDEF_INT; }

ncclResult_t bad(const char* function, const char* field, int value, const char* remedy) {
  return fail(ncclInvalidArgument,
              std::string(function) + ": config." + field + " is " + std::to_string(value) + ": " + remedy);
}

ncclResult_t check_values(const char* function, const ncclCollConfig_t& c) {
  if (c.forceAlgSelection != 0 && c.forceAlgSelection != 1)
    return bad(function, "forceAlgSelection", c.forceAlgSelection, "give 0 or 1");
  constexpr int kPolicies = NCCL_CTA_POLICY_EFFICIENCY | NCCL_CTA_POLICY_ZERO;
  if (given(c.CTAPolicy) && (c.CTAPolicy < 0 || c.CTAPolicy > kPolicies))
    return bad(function, "CTAPolicy", c.CTAPolicy, "give NCCL_CTA_POLICY_ values");
  for (const auto& [name, value] :
       {std::pair{"minCTAs", c.minCTAs}, std::pair{"maxCTAs", c.maxCTAs}, std::pair{"nvlsCTAs", c.nvlsCTAs}}) {
    if (given(value) && value < 1) return bad(function, name, value, "give 1 or more, or leave it undefined");
  }
  if (given(c.minCTAs) && given(c.maxCTAs) && c.minCTAs > c.maxCTAs)
    return bad(function, "minCTAs", c.minCTAs, "give no more than maxCTAs");
  return ncclSuccess;
}

// Splits a list of names at commas and the like.
std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> all;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(",;| "), text.size());
    if (end > 0) all.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return all;
}

// NCCL's names join an algorithm and a protocol (RING_LL128); MoECCL has no protocols. Other names are taken as they
// are.
std::string our_name(std::string_view word) {
  std::string name;
  for (const char c : word) name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const char* family : {"ring", "tree"}) {
    if (name.starts_with(std::string(family) + "_")) return family;
  }
  return name;
}

// Asks for the current plan of the call's operation.
ncclResult_t look(const Call& call, Comm& comm, moecclPlanInfo_t* info) {
  *info = {};
  info->size = sizeof *info;
  return from_moeccl(moecclPlanQuery(comm.ours, call.kind, call.count, static_cast<moecclDataType_t>(call.type), info));
}

// Forces the first of the call's algorithms that can run it, from now on.
ncclResult_t force_one(const Call& call, Comm& comm) {
  const moecclOp_t op = call.kind;
  std::string why;
  for (const std::string_view word : words(call.config->algorithms())) {
    const std::string name = our_name(word);
    if (moecclPlanForce(comm.ours, op, name.c_str()) != moecclSuccess) {
      why = moecclGetLastError(nullptr);
      continue;
    }
    moecclPlanInfo_t info;
    const ncclResult_t asked = look(call, comm, &info);
    if (asked != ncclSuccess) return asked;
    if (info.note[0] == '\0') return ncclSuccess;
    why = info.note;
  }
  (void)moecclPlanForce(comm.ours, op, comm.chosen[op].before.c_str());
  if (!call.config->must()) return ncclSuccess;
  return fail(ncclInvalidUsage, std::string(call.function) + ": the config asks for the algorithm " +
                                    call.config->algorithms() + ", which cannot run this call: " + why +
                                    ". Set config.forceAlgSelection to 0 to fall back to the automatic choice");
}

}  // namespace

ncclResult_t CallConfig::from(const char* function, const ncclCollConfig_t& config, CallConfig* out) {
  if (config.magic != NCCL_CONFIG_MAGIC || config.size < kLeastSize) {
    return fail(ncclInvalidArgument,
                std::string(function) + ": config was not initialised: assign NCCL_COLLCONFIG_INITIALIZER to it");
  }
  const size_t known = std::min(config.size, sizeof config);
  std::memcpy(&out->given_, &config, known);
  out->given_.size = known;
  const ncclResult_t checked = check_values(function, out->given_);
  if (checked != ncclSuccess) return checked;
  if (config.algSelection != nullptr) {
    out->selection_ = out->algorithms_ = config.algSelection;
    out->given_.algSelection = out->selection_.c_str();
  }
  for (const ncclConfigExt_t* e = config.ext; e != nullptr; e = e->next) {
    if (out->options_.size() == kMostOptions) {
      return fail(ncclInvalidArgument, std::string(function) + ": config.ext has no end: is it a circle?");
    }
    out->options_.push_back(*e);
    if (e->key.vendorId == MOECCL_NCCL_VENDOR && e->key.optionId == MOECCL_NCCL_OPTION_ALGORITHM &&
        e->val.s != nullptr) {
      out->algorithms_ = e->val.s;
    }
  }
  for (size_t i = 0; i < out->options_.size(); ++i) {
    out->options_[i].next = i + 1 < out->options_.size() ? &out->options_[i + 1] : nullptr;
  }
  out->given_.ext = out->options_.empty() ? nullptr : out->options_.data();
  return ncclSuccess;
}

const std::string& wanted_algorithms(const Call& call) {
  static const std::string none;
  return call.config != nullptr ? call.config->algorithms() : none;
}

ncclResult_t choose_algorithm(const Call& call, Comm& comm) {
  const std::string& wanted = wanted_algorithms(call);
  if (wanted.empty() && !comm.any_chosen.load(std::memory_order_relaxed)) return ncclSuccess;
  const std::lock_guard lock(comm.mutex);
  const moecclOp_t op = call.kind;
  Comm::Chosen& chosen = comm.chosen[op];
  if (wanted.empty()) {
    if (!chosen.wanted.empty()) (void)moecclPlanForce(comm.ours, op, chosen.before.c_str());
    chosen = {};
    return ncclSuccess;
  }
  // The choice is kept until another call wants something else, because planning anew has its price. Which name of a
  // list runs depends on the size of the call.
  if (chosen.wanted == wanted && chosen.count == call.count && chosen.type == call.type) return ncclSuccess;
  if (chosen.wanted.empty()) {
    moecclPlanInfo_t info;
    const ncclResult_t asked = look(call, comm, &info);
    if (asked != ncclSuccess) return asked;
    chosen.before = info.forced;
  }
  chosen.wanted = wanted;
  chosen.count = call.count;
  chosen.type = call.type;
  comm.any_chosen.store(true, std::memory_order_relaxed);
  const ncclResult_t forced = force_one(call, comm);
  if (forced != ncclSuccess) chosen.count = ~size_t{0};  // the next call tries again
  return forced;
}

ncclResult_t record_event(const Call& call) {
  if (call.config == nullptr || call.config->event() == nullptr) return ncclSuccess;
  // Before the call, as NCCL does where CUDA cannot record a launch.
  if (device::record(call.config->event(), call.stream)) return ncclSuccess;
  return fail(ncclInvalidUsage, std::string(call.function) +
                                    ": config.launchCompletionEvent cannot be recorded: it must be a CUDA event, and "
                                    "the stream a CUDA stream, of this process's device, and there must be one");
}

}  // namespace moeccl::shim
