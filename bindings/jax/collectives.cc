// SPDX-License-Identifier: Apache-2.0
// Handlers of the collectives. Each takes one buffer and gives one; shapes are those of moeccl/collectives.h.
#include "bindings/jax/members.h"

namespace moeccl::jax {
namespace {

// A call's buffers as arguments of a C function.
struct Arguments {
  const void* send;
  void* recv;
  size_t count;  // elements of `type` in a block
  moecclDataType_t type;
  moecclComm_t comm;
  moecclStream_t stream;
};
// Blocks of `count` elements in each buffer: one, or one for each rank.
enum class Blocks { kOne, kRanks };
struct Shape {
  Blocks in = Blocks::kOne, out = Blocks::kOne;
};

// Runs `function`, moecclResult_t(const Arguments&), while no other program uses the communicator.
template <typename Function>
Outcome run(const Call& call, Shape shape, Function function) {
  std::shared_ptr<Member> member;
  std::unique_lock<std::mutex> lock;  // ends before the member, which has the mutex
  if (Outcome failed = member_of(call, &member, &lock)) return failed;
  const Buffer &in = call.in(0), &out = call.out(0);
  const std::optional<Element> element = element_of(in.type);
  if (!element || out.type != in.type)
    return Failure{XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   "XLA's element type " + std::to_string(in.type) + " cannot be sent: convert the array"};
  int n = 0;
  if (const moecclResult_t result = moecclCommCount(member->comm, &n); result != moecclSuccess)
    return failure_of(result, nullptr);
  const auto ranks = static_cast<size_t>(n);
  const size_t in_blocks = shape.in == Blocks::kRanks ? ranks : 1, out_blocks = shape.out == Blocks::kRanks ? ranks : 1,
               block = in.elements / in_blocks;
  if (block * in_blocks != in.elements || block * out_blocks != out.elements)
    return Failure{XLA_FFI_Error_Code_INVALID_ARGUMENT,
                   std::to_string(in.elements) + " elements in and " + std::to_string(out.elements) +
                       " out do not fit " + std::to_string(n) + " ranks: make the program anew with this communicator"};
  const moecclResult_t result =
      function({in.data, out.data, block * element->parts, element->type, member->comm, call.stream()});
  return result == moecclSuccess ? Outcome{} : failure_of(result, member->comm);
}

// Gets the attributes "op" and "root", if the pointers are not null, and runs.
template <typename Function>
Outcome run(const Call& call, Shape shape, moecclRedOp_t* op, int* root, Function function) {
  int64_t value = 0;
  if (op != nullptr) {
    if (Outcome failed = call.attribute("op", &value)) return failed;
    *op = static_cast<moecclRedOp_t>(value);
  }
  if (root != nullptr) {
    if (Outcome failed = call.attribute("root", &value)) return failed;
    *root = static_cast<int>(value);
  }
  return run(call, shape, function);
}

Outcome all_reduce(const Call& call) {
  moecclRedOp_t op{};
  return run(call, Shape{}, &op, nullptr, [&](const Arguments& a) {
    return moecclAllReduce(a.send, a.recv, a.count, a.type, op, a.comm, a.stream);
  });
}

Outcome reduce(const Call& call) {
  moecclRedOp_t op{};
  int root{};
  return run(call, Shape{}, &op, &root, [&](const Arguments& a) {
    return moecclReduce(a.send, a.recv, a.count, a.type, op, root, a.comm, a.stream);
  });
}

Outcome broadcast(const Call& call) {
  int root{};
  return run(call, Shape{}, nullptr, &root, [&](const Arguments& a) {
    return moecclBroadcast(a.send, a.recv, a.count, a.type, root, a.comm, a.stream);
  });
}

Outcome all_gather(const Call& call) {
  return run(call, Shape{.out = Blocks::kRanks},
             [&](const Arguments& a) { return moecclAllGather(a.send, a.recv, a.count, a.type, a.comm, a.stream); });
}

Outcome reduce_scatter(const Call& call) {
  moecclRedOp_t op{};
  return run(call, Shape{.in = Blocks::kRanks}, &op, nullptr, [&](const Arguments& a) {
    return moecclReduceScatter(a.send, a.recv, a.count, a.type, op, a.comm, a.stream);
  });
}

Outcome all_to_all(const Call& call) {
  return run(call, Shape{.in = Blocks::kRanks, .out = Blocks::kRanks},
             [&](const Arguments& a) { return moecclAllToAll(a.send, a.recv, a.count, a.type, a.comm, a.stream); });
}

}  // namespace
}  // namespace moeccl::jax

MOECCL_JAX_HANDLERS(moecclJaxAllReduce, "all_reduce", 1, 1, moeccl::jax::all_reduce)
MOECCL_JAX_HANDLERS(moecclJaxReduce, "reduce", 1, 1, moeccl::jax::reduce)
MOECCL_JAX_HANDLERS(moecclJaxBroadcast, "broadcast", 1, 1, moeccl::jax::broadcast)
MOECCL_JAX_HANDLERS(moecclJaxAllGather, "all_gather", 1, 1, moeccl::jax::all_gather)
MOECCL_JAX_HANDLERS(moecclJaxReduceScatter, "reduce_scatter", 1, 1, moeccl::jax::reduce_scatter)
MOECCL_JAX_HANDLERS(moecclJaxAllToAll, "all_to_all", 1, 1, moeccl::jax::all_to_all)
