#include "src/comm/split.h"

#include <algorithm>
#include <vector>

#include "src/bootstrap/bootstrap.h"
#include "src/comm/collective.h"

namespace moeccl::comm {

Status all_gather_bytes(Communicator& comm, const void* mine, size_t bytes, void* all) {
  return run_collective(comm,
                        {.op = moecclOpAllGather, .send = mine, .recv = all, .count = bytes, .type = moecclUint8});
}

Result<std::unique_ptr<Communicator>> split(Communicator& parent, int color, int key, const moecclConfig_t* given) {
  MOECCL_TRY(parent.usable());
  Config config = parent.config();
  // The parent's topology describes the parent's ranks.
  config.topology.clear();
  config.pace = false;
  if (given != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(config, Config::from(given));
  }
  struct Wish {
    int32_t color, key;
  };
  const Wish mine{color, key};
  std::vector<Wish> wishes(parent.n_ranks());
  MOECCL_TRY(all_gather_bytes(parent, &mine, sizeof(mine), wishes.data()));
  std::vector<uint32_t> members;
  for (uint32_t r = 0; r < parent.n_ranks(); ++r) {
    if (color >= 0 && wishes[r].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](uint32_t a, uint32_t b) { return wishes[a].key < wishes[b].key; });
  // The first member of each part makes its id; all take part in passing them on.
  moecclUniqueId id{};
  if (!members.empty() && members[0] == parent.rank()) {
    MOECCL_ASSIGN_OR_RETURN(id, bootstrap::make_unique_id(parent.address()));
  }
  std::vector<moecclUniqueId> ids(parent.n_ranks());
  MOECCL_TRY(all_gather_bytes(parent, &id, sizeof(id), ids.data()));
  if (members.empty()) return std::unique_ptr<Communicator>();
  const auto at = std::find(members.begin(), members.end(), parent.rank());
  std::shared_ptr<const Lanes> lanes;
  if (config.pace && config.topology.empty()) {
    if (parent.lanes() == nullptr) {
      return error(
          moecclInvalidArgument,
          "config.pace is 1 without a topology, and the communicator to be split is not paced: give a topology");
    }
    lanes = parent.lanes()->of_part(members);
  }
  // Few as its ranks may be, the others of the parent want the same cores: none of them is a stranger to wait out.
  config.crowded = parent.fabric().crowded;
  return Communicator::init(ids[members[0]], static_cast<int>(members.size()), static_cast<int>(at - members.begin()),
                            config, std::move(lanes));
}

}  // namespace moeccl::comm
