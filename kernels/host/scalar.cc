#include <cstring>

#include "kernels/host/float_formats.h"
#include "kernels/table.h"

namespace moeccl::kernels {
namespace {

template <class T>
T load(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

}  // namespace

Scalar scalar_from(const void* element, moecclDataType_t type) {
  Scalar s{};
  switch (type) {
    case moecclInt8:
      s.i64 = load<int8_t>(element);
      break;
    case moecclUint8:
      s.u64 = load<uint8_t>(element);
      break;
    case moecclInt32:
      s.i64 = load<int32_t>(element);
      break;
    case moecclUint32:
      s.u64 = load<uint32_t>(element);
      break;
    case moecclInt64:
    case moecclUint64:
      s.u64 = load<uint64_t>(element);
      break;
    case moecclFloat16:
      s.f32 = Fp16::decode(load<uint16_t>(element));
      break;
    case moecclBfloat16:
      s.f32 = Bf16::decode(load<uint16_t>(element));
      break;
    case moecclFloat8e4m3:
      s.f32 = Fp8e4m3::decode(load<uint8_t>(element));
      break;
    case moecclFloat8e5m2:
      s.f32 = Fp8e5m2::decode(load<uint8_t>(element));
      break;
    case moecclFloat32:
      s.f32 = load<float>(element);
      break;
    case moecclFloat64:
      s.f64 = load<double>(element);
      break;
  }
  return s;
}

}  // namespace moeccl::kernels
