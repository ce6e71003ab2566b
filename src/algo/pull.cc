#include "src/algo/pull.h"

namespace moeccl::algo {
namespace {

constexpr uint32_t kReady = 0;  // the staged chunk can be read
constexpr uint32_t kRead = 1;   // it has been read

}  // namespace

std::vector<Ref> peers_slots(const Shape& shape, uint32_t rank, uint32_t index, Ref own) {
  std::vector<Ref> srcs;
  for (uint32_t p = 0; p < shape.n_ranks; ++p)
    srcs.push_back(p == rank ? own : part(slot(p, index), own.part, own.parts));
  return srcs;
}

Program pull_all_gather(const Shape& shape, uint32_t rank, Layout layout) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout);
  b.copy(slot(rank, 0), in(rank));
  b.signal_all(kReady);
  b.copy(out(rank, rank), in(rank));
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kReady);
    b.copy(out(rank, p), slot(p, 0));
  }
  return std::move(b).finish();
}

Program pull_reduce_scatter(const Shape& shape, uint32_t rank, Layout layout) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout);
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.copy(slot(rank, p), in(rank, p));
    b.signal(p, kReady);
  }
  b.wait_all(kReady);
  b.reduce(out(rank), peers_slots(shape, rank, rank, in(rank, rank)), true);
  return std::move(b).finish();
}

Program pull_all_to_all(const Shape& shape, uint32_t rank, Layout layout) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout);
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.after(i);
    b.copy(slot(rank, p), in(rank, p));
    b.signal(p, kReady);
  }
  b.copy(out(rank, rank), in(rank, rank));
  for (uint32_t i = 1; i < shape.n_ranks; ++i) {
    const uint32_t p = b.before(i);
    b.wait(p, kReady);
    b.copy(out(rank, p), slot(p, rank));
  }
  return std::move(b).finish();
}

Program pull_broadcast(const Shape& shape, uint32_t rank, Layout layout, bool credits) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout);
  if (rank == shape.root) {
    if (credits) b.wait_all(kRead, layout.depth);
    b.copy(slot(rank, 0), in(rank));
    b.signal_all(kReady);
    b.copy(out(rank), in(rank));
  } else {
    b.wait(shape.root, kReady);
    b.copy(out(rank), slot(shape.root, 0));
    if (credits) b.signal(shape.root, kRead);
  }
  return std::move(b).finish();
}

Program pull_gather(const Shape& shape, uint32_t rank, Layout layout, bool credits) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout);
  if (rank == shape.root) {
    b.copy(out(rank, rank), in(rank));
    for (uint32_t i = 1; i < shape.n_ranks; ++i) {
      const uint32_t p = b.after(i);
      b.wait(p, kReady);
      b.copy(out(rank, p), slot(p, 0));
      if (credits) b.signal(p, kRead);
    }
  } else {
    if (credits) b.wait(shape.root, kRead, layout.depth);
    b.copy(slot(rank, 0), in(rank));
    b.signal(shape.root, kReady);
  }
  return std::move(b).finish();
}

Program pull_scatter(const Shape& shape, uint32_t rank, Layout layout, bool credits) {
  if (shape.n_ranks == 1) return solo(shape);
  ProgramBuilder b(shape, rank, layout);
  if (rank == shape.root) {
    for (uint32_t i = 1; i < shape.n_ranks; ++i) {
      const uint32_t p = b.after(i);
      if (credits) b.wait(p, kRead, layout.depth);
      b.copy(slot(rank, p), in(rank, p));
      b.signal(p, kReady);
    }
    b.copy(out(rank), in(rank, rank));
  } else {
    b.wait(shape.root, kReady);
    b.copy(out(rank), slot(shape.root, rank));
    if (credits) b.signal(shape.root, kRead);
  }
  return std::move(b).finish();
}

}  // namespace moeccl::algo
