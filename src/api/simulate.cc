// Entry point of simulate.h.
#include "moeccl/simulate.h"

#include <cstring>

#include "src/api/convert.h"
#include "src/base/adopt.h"
#include "src/calibrate/simulate.h"

using namespace moeccl;

moecclResult_t moecclSimulate(const moecclSimulateConfig_t* config, char* text, size_t text_bytes, size_t* needed) {
  return api::guarded(nullptr, [&]() -> Status {
    if (config == nullptr) return api::null_argument("config", "the address of a moecclSimulateConfig_t");
    if (config->size < sizeof(size_t) || config->size > 4096)
      return error(moecclInvalidArgument, "config.size is {}: use MOECCL_SIMULATE_CONFIG_INIT", config->size);
    const auto i = static_cast<int>(config->op);
    if (i < 0 || i >= MOECCL_NUM_OPS) return error(moecclInvalidArgument, "op is {}: give a moecclOp_t", i);
    moecclSimulateConfig_t mine{};
    std::memcpy(&mine, config, adopted_bytes(config->size, sizeof(mine)));
    MOECCL_ASSIGN_OR_RETURN(const std::string page, comm::simulate(mine));
    api::copy_text(page, text, text_bytes, needed);
    return {};
  });
}
