// SPDX-License-Identifier: Apache-2.0
#include "src/exec/operation.h"

#include "src/base/data_type.h"
#include "src/base/format.h"
#include "src/base/hash.h"
#include "src/exec/runner.h"

namespace moeccl::exec {

const char* reduce_name(uint8_t reduce) {
  static constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg", "premulsum"};
  return reduce < std::size(kNames) ? kNames[reduce] : "unknown operator";
}

uint32_t traffic_class(moecclOp_t op, int priority) {
  return static_cast<uint32_t>((priority > 0 ? priority : plan::facts(op).traffic) - 1);
}

uint64_t pack(const Signature& s, uint64_t flags) {
  return static_cast<uint64_t>(s.op) << 56 | static_cast<uint64_t>(s.type) << 48 |
         static_cast<uint64_t>(s.reduce) << 40 | flags << 32 | s.root;
}

Signature unpack(uint64_t packed, uint64_t count, uint64_t plan) {
  return {static_cast<moecclOp_t>(packed >> 56),
          static_cast<moecclDataType_t>(packed >> 48 & 0xff),
          static_cast<uint8_t>(packed >> 40 & 0xff),
          static_cast<uint32_t>(packed),
          count,
          plan};
}

uint64_t extend_history(uint64_t history, const Signature& s) {
  // Odd factors keep the three apart. Independent products cost less than a chain of them.
  const uint64_t mixed =
      pack(s, 0) * 0x9e3779b97f4a7c15u + s.count * 0xc2b2ae3d27d4eb4fu + s.plan * 0x165667b19e3779f9u;
  return hash_combine(history, mixed ^ mixed >> 29);
}

std::string describe_difference(uint32_t rank_a, const Signature& a, uint32_t rank_b, const Signature& b) {
  const auto say = [&](const char* field, const std::string& va, const std::string& vb) {
    return format("ranks disagree on the {}: rank {} calls {} with {}, rank {} calls {} with {}", field, rank_a,
                  op_name(a.op), va, rank_b, op_name(b.op), vb);
  };
  if (a.op != b.op) {
    return format(
        "ranks disagree on the operation: rank {} calls {}, rank {} calls {} (the order of calls must be the "
        "same on all ranks)",
        rank_a, op_name(a.op), rank_b, op_name(b.op));
  }
  if (a.count != b.count) return say("count", format("{}", a.count), format("{}", b.count));
  if (a.type != b.type) return say("type", type_name(a.type), type_name(b.type));
  if (a.reduce != b.reduce) return say("operator", reduce_name(a.reduce), reduce_name(b.reduce));
  if (a.root != b.root && a.op == moecclOpAllToAllv)
    return say("layer of moecclGradientReturnReduce", format("{} (from 1; 0: the collective itself)", a.root),
               format("{}", b.root));
  if (a.root != b.root) return say("root", format("{}", a.root), format("{}", b.root));
  if (plan::facts(a.op).plan == plan::PlanOf::kRouting)
    return say("routing", format("routing and plan {:016x}", a.plan),
               format("{:016x} (calls must use the same routing of the same layer on all ranks)", b.plan));
  if (a.op == moecclOpTensorAllToAllv)
    return say("counts", format("counts and plan {:016x}", a.plan), format("{:016x}", b.plan));
  if (plan::facts(a.op).plan == plan::PlanOf::kPlacement)
    return say("placement", format("placement and plan {:016x}", a.plan), format("{:016x}", b.plan));
  return say("plan", format("plan {:016x}", a.plan),
             format("plan {:016x} (moecclPlanForce, MOECCL_PLAN, the topology or the profile differs)", b.plan));
}

bool Operation::on_device() const { return runner->on_device(); }

kernels::Scalar unit_scale(moecclDataType_t type) {
  kernels::Scalar one{};
  switch (type_facts(type).wide) {
    case Wide::kFloat64:
      one.f64 = 1;
      break;
    case Wide::kFloat32:
      one.f32 = 1;
      break;
    case Wide::kInt64:
      one.i64 = 1;
  }
  return one;
}

}  // namespace moeccl::exec
