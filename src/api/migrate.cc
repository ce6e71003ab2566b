// SPDX-License-Identifier: Apache-2.0
// Entry points of migrate.h.
#include "moeccl/migrate.h"

#include <memory>

#include "src/api/convert.h"
#include "src/api/hybrid_handle.h"
#include "src/moe/migrate/migration.h"

using namespace moeccl;
using comm::Communicator;

namespace {

struct MigrationHandle {
  moecclComm_t comm_handle;
  std::unique_ptr<comm::Migration> migration;
};
using MigrationTable = api::HandleTable<MigrationHandle, moecclMigration_t, 0xC8>;

template <class Body>
moecclResult_t with_migration(moecclMigration_t handle, Body&& body) {
  const Result<MigrationHandle*> found =
      api::live(MigrationTable::get(), handle, "migration", "migration", "moecclMigrationCreate");
  if (!found.ok()) return api::finish(found.status());
  comm::Migration& migration = *found.value()->migration;
  return api::with_comm(
      found.value()->comm_handle, [&](Communicator&) { return body(migration); }, "the migration's");
}

}  // namespace

moecclResult_t moecclMigrationCreate(moecclMigration_t* migration, moecclHybrid_t hybrid, moecclComm_t comm_handle,
                                     const moecclMigrationConfig_t* config) {
  return api::with_hybrid(hybrid, [&](comm::Hybrid& h, Communicator&) -> Status {
    MOECCL_TRY(api::clear(migration, "migration", "the address of a moecclMigration_t"));
    MOECCL_TRY(api::outside_groups("moecclMigrationCreate"));
    auto handle = std::make_unique<MigrationHandle>();
    handle->comm_handle = comm_handle == nullptr ? api::HybridTable::get().find(hybrid)->comm_handle : comm_handle;
    return api::make_on(handle->comm_handle, [&](Communicator& comm) -> Status {
      MOECCL_ASSIGN_OR_RETURN(handle->migration, comm::Migration::create(h, comm, config));
      MOECCL_ASSIGN_OR_RETURN(*migration, MigrationTable::get().add(std::move(handle)));
      return {};
    });
  });
}

moecclResult_t moecclMigrationDestroy(moecclMigration_t migration) {
  return api::guarded(nullptr,
                      [&] { return api::destroy(MigrationTable::get(), migration, "migration", "migration"); });
}

moecclResult_t moecclMigrationGetInfo(moecclMigration_t migration, int layer, moecclMigrationInfo_t* info) {
  return with_migration(migration, [&](comm::Migration& m) { return m.info(layer, info); });
}

moecclResult_t moecclMigrationSend(moecclMigration_t migration, int layer, const void* experts, const void* shared,
                                   moecclCodecError_t* errors) {
  return with_migration(migration, [&](comm::Migration& m) { return m.send(layer, experts, shared, errors); });
}

moecclResult_t moecclMigrationSendFused(moecclMigration_t migration, int layer, const void* experts, const void* shared,
                                        moecclExpertUpdateFn_t update, void* context, moecclCodecError_t* errors) {
  return with_migration(migration, [&](comm::Migration& m) -> Status {
    MOECCL_TRY(comm::check_update(update, "moecclMigrationSend"));
    comm::ExpertUpdate step(update, context);
    return m.send(layer, experts, shared, errors, &step);
  });
}

moecclResult_t moecclMigrationBegin(moecclMigration_t migration, int layer) {
  return with_migration(migration, [&](comm::Migration& m) { return m.begin(layer); });
}

moecclResult_t moecclMigrationBeginInto(moecclMigration_t migration, int layer, const void* shared, void* held) {
  return with_migration(migration, [&](comm::Migration& m) {
    using Pin = api::CommTable::Pin;
    auto pin = std::make_shared<Pin>(api::CommTable::get().pin(MigrationTable::get().find(migration)->comm_handle));
    const comm::Migration::Into into{shared, held, std::move(pin)};
    return m.begin(layer, &into);
  });
}

moecclResult_t moecclMigrationWaitExpert(moecclMigration_t migration, int layer, int index) {
  return with_migration(migration, [&](comm::Migration& m) -> Status {
    MOECCL_TRY(api::outside_groups("moecclMigrationWaitExpert"));
    return m.wait_expert(layer, index);
  });
}

moecclResult_t moecclMigrationWait(moecclMigration_t migration, int layer, const void* shared, void* held,
                                   uint64_t* epoch) {
  return with_migration(migration, [&](comm::Migration& m) -> Status {
    MOECCL_TRY(api::outside_groups("moecclMigrationWait"));
    return m.wait(layer, shared, held, epoch);
  });
}

moecclResult_t moecclMigrationWaitEncoded(moecclMigration_t migration, int layer, const void* shared, uint64_t* epoch) {
  return with_migration(migration, [&](comm::Migration& m) -> Status {
    MOECCL_TRY(api::outside_groups("moecclMigrationWaitEncoded"));
    return m.wait_encoded(layer, shared, epoch);
  });
}

moecclResult_t moecclMigrationUseExpert(moecclMigration_t migration, int layer, int index,
                                        const moecclExpertUse_t* use) {
  return with_migration(migration, [&](comm::Migration& m) { return m.use_expert(layer, index, use); });
}

moecclResult_t moecclMigrationTest(moecclMigration_t migration, int layer, int* done) {
  return with_migration(migration, [&](comm::Migration& m) { return m.test(layer, done); });
}
