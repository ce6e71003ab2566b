// SPDX-License-Identifier: Apache-2.0
#include "src/moe/migrate/expert_use.h"

#include "src/base/adopt.h"

namespace moeccl::comm {

Status check_update(moecclExpertUpdateFn_t update, const char* unfused) {
  if (update != nullptr) return {};
  return error(moecclInvalidArgument, "update is NULL: give the optimizer's step, or call {} behind it", unfused);
}

kernels::CodecUpdate ExpertUpdate::function() {
  return [this](uint32_t expert, uint64_t first, uint64_t count) {
    result_ = update_(context_, static_cast<int>(expert), first, count);
    expert_ = expert;
    first_ = first;
    count_ = count;
    return result_ == 0;
  };
}

Status ExpertUpdate::status(const char* remedy) const {
  if (!stopped()) return {};
  return error(
      moecclInvalidUsage,
      "update returned {} for elements {} to {} of expert {}: those before have their new values, those behind "
      "their old ones; {}",
      result_, first_, first_ + count_ - 1, expert_, remedy);
}

Result<ExpertUse> ExpertUse::create(const moecclExpertUse_t* given, uint64_t count) {
  MOECCL_ASSIGN_OR_RETURN(const moecclExpertUse_t use, adopt(given, "use"));
  if (use.use == nullptr)
    return error(moecclInvalidArgument, "use.use is NULL: give the computation, or decode to memory");
  if (use.first > count)
    return error(moecclInvalidArgument, "use.first is {}: an expert has {} elements", use.first, count);
  if (use.count > count - use.first)
    return error(moecclInvalidArgument, "use.count is {}: from element {} on an expert has {}", use.count, use.first,
                 count - use.first);
  ExpertUse made;
  made.use_ = use.use;
  made.context_ = use.context;
  made.range_ = {use.first, use.count == 0 ? count - use.first : use.count, use.row == 0 ? 1 : use.row};
  if (made.range_.count % made.range_.row != 0)
    return error(moecclInvalidArgument, "use.row is {}: give a length that divides the {} elements from element {} on",
                 use.row, made.range_.count, use.first);
  return made;
}

kernels::CodecUse ExpertUse::function() {
  return [this](uint64_t first, uint64_t count, const void* values) {
    result_ = use_(context_, first, count, values);
    first_ = first;
    count_ = count;
    return result_ == 0;
  };
}

Status ExpertUse::status() const {
  if (result_ == 0) return {};
  return error(moecclInvalidUsage,
               "use.use returned {} for elements {} to {}: it has run on those before, and not on those behind",
               result_, first_, first_ + count_ - 1);
}

}  // namespace moeccl::comm
