// Allocation signatures and moving storages as torch operators; `runtime/signatures.py` calls them.
#include <ATen/core/List.h>
#include <torch/library.h>

#include <unordered_set>

#include "cpu_shim.h"
#include "storage.h"

namespace dmuon::allocator {
namespace {

// A table, and what it needs of torch.
struct Signatures {
  Signatures(c10::Device where, int64_t keys)
      : device(where), table(std::make_shared<Table>(keys, code_of(where))) {}

  const c10::Device device;
  const std::shared_ptr<Table> table;
  std::mutex mutex;
  // Storages of delivered gradients by their memory in a pool: who keeps a gradient is moved away.
  std::unordered_map<const void*, c10::weak_intrusive_ptr<c10::StorageImpl>> delivered;
  std::unordered_map<int64_t, c10::ScalarType> dtypes;
};

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::unordered_map<int64_t, std::shared_ptr<Signatures>> open;
};

Registry& registry() {
  static Registry& all = *new Registry;
  return all;
}

std::shared_ptr<Signatures> find(int64_t number) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.open.find(number);
  TORCH_CHECK(found != all.open.end(), "allocation signatures: used after close()");
  return found->second;
}

bool uses(const Registry& all, c10::DeviceType type) {
  for (const auto& entry : all.open) {
    if (entry.second->device.type() == type) return true;
  }
  return false;
}

int64_t open_table(at::Device device, int64_t keys) {
  TORCH_CHECK_VALUE(keys >= 0, "allocation signatures: ", keys, " parameters");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (device.is_cpu()) {
    CpuShim::get().install();
  } else {
#ifdef DMUON_CUDA
    TORCH_CHECK_VALUE(device.is_cuda() && device.has_index(), "allocation signatures: device ",
                      device, ", expected cpu or cuda:N");
    install_cuda();
#else
    TORCH_CHECK_VALUE(false, "allocation signatures: device ", device, ", expected cpu");
#endif
  }
  all.open.emplace(++all.last, std::make_shared<Signatures>(device, keys));
  return all.last;
}

void close_table(int64_t number) {
  std::shared_ptr<Signatures> closed;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.open.find(number);
    if (found == all.open.end()) return;
    closed = std::move(found->second);
    all.open.erase(found);
    if (!uses(all, closed->device.type())) {
      if (closed->device.is_cpu()) CpuShim::get().uninstall();
#ifdef DMUON_CUDA
      if (closed->device.is_cuda()) uninstall_cuda();
#endif
    }
  }
  // Closes its scope, whichever thread opened it. Behind the lock: places are given up here.
  closed->table->begin();
}

// Moves a storage that lives in a place to ordinary memory, with its content. Not one that is also
// used from outside of torch (numpy): that would not follow.
void move_away(c10::StorageImpl& storage) {
  if (storage.resizable()) move_back(storage, true);
}

// What still lives in a place, and whether it is known that it cannot move.
struct Lodger {
  Stretch stretch;
  bool fixed;
};

std::vector<Lodger> vacate(Signatures& signatures, const void* data, uint64_t bytes) {
  std::unordered_set<const void*> fixed;
  for (const Stretch& stretch : signatures.table->living(data, bytes)) {
    c10::intrusive_ptr<c10::StorageImpl> kept;
    {
      const std::lock_guard lock(signatures.mutex);
      const auto found = signatures.delivered.find(stretch.data);
      if (found == signatures.delivered.end()) continue;
      kept = found->second.lock();
    }
    // It may have been resized since, and something else live there.
    if (!kept || kept->data() != stretch.data) continue;
    if (!kept->resizable()) fixed.insert(stretch.data);
    move_away(*kept);
  }
  std::vector<Lodger> left;
  for (const Stretch& stretch : signatures.table->living(data, bytes)) {
    left.push_back({stretch, fixed.count(stretch.data) != 0});
  }
  return left;
}

// Whether the tensor's memory is a place; then it gets its own, with the content.
void move_out(Signatures& signatures, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return;
  if (tensor.device() != signatures.device) return;
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  if (storage.nbytes() == 0) return;
  const auto stretches = signatures.table->living(storage.data(), 1);
  if (!stretches.empty() && stretches[0].data == storage.data()) move_away(storage);
}

void check_place(const Signatures& signatures, int64_t key, const at::Tensor& place) {
  const std::string what = "enter: place of parameter " + std::to_string(key);
  TORCH_CHECK_VALUE(key >= 0 && key < signatures.table->keys(), what, ": there are ",
                    signatures.table->keys(), " parameters");
  storage_of(place, what.c_str());
  TORCH_CHECK_VALUE(place.device() == signatures.device, what, ": is on ", place.device(),
                    ", expected ", signatures.device);
  TORCH_CHECK_VALUE(place.is_contiguous(), what, ": is not contiguous");
  check_aligned(place, what.c_str());
}

void begin(int64_t number) { find(number)->table->begin(); }

void enter(int64_t number, int64_t layer, at::IntArrayRef keys, at::TensorList tensors) {
  const auto signatures = find(number);
  TORCH_CHECK_VALUE(keys.size() == tensors.size(), "enter: ", keys.size(), " parameters and ",
                    tensors.size(), " places");
  std::vector<Place> places;
  for (size_t i = 0; i < keys.size(); ++i) {
    check_place(*signatures, keys[i], tensors[i]);
    void* data = tensors[i].data_ptr();
    vacate(*signatures, data, tensors[i].nbytes());
    places.push_back(
        {keys[i], data, tensors[i].nbytes(), std::make_shared<at::Tensor>(tensors[i])});
    const std::lock_guard lock(signatures->mutex);
    signatures->dtypes[keys[i]] = tensors[i].scalar_type();
  }
  signatures->table->enter(layer, std::move(places));
}

void leave(int64_t number) { find(number)->table->leave(); }

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && tensor.is_contiguous() &&
         !tensor.is_conj() && !tensor.is_neg();
}

using Gradients = c10::List<std::optional<at::Tensor>>;

// Gradients of one call that share their memory: none of them can have it as its place.
std::unordered_set<const void*> shared_memory(const Gradients& gradients) {
  std::unordered_set<const void*> seen, shared;
  for (const std::optional<at::Tensor>& gradient : gradients) {
    if (!gradient || !is_plain(*gradient) || gradient->numel() == 0) continue;
    const void* start = gradient->storage().data();
    if (!seen.insert(start).second) shared.insert(start);
  }
  return shared;
}

Outcome deliver_one(Signatures& signatures, int64_t key, const at::Tensor& gradient,
                    const std::unordered_set<const void*>& shared) {
  Gradient found;
  found.key = key;
  found.bytes = static_cast<uint64_t>(gradient.numel()) * gradient.element_size();
  if (is_plain(gradient) && gradient.numel() > 0 && gradient.device() == signatures.device) {
    const std::lock_guard lock(signatures.mutex);
    const auto dtype = signatures.dtypes.find(key);
    found.data = gradient.const_data_ptr();
    found.whole = shared.count(gradient.storage().data()) == 0 &&
                  (dtype == signatures.dtypes.end() || dtype->second == gradient.scalar_type());
  }
  const Outcome outcome = signatures.table->deliver(found);
  if (outcome == Outcome::in_place) {
    const std::lock_guard lock(signatures.mutex);
    signatures.delivered.insert_or_assign(found.data, gradient.storage().getWeakStorageImpl());
  }
  return outcome;
}

// Per parameter its outcome; behind these, how many parameters are given up.
std::vector<int64_t> deliver(int64_t number, at::IntArrayRef keys, const Gradients& gradients) {
  const auto signatures = find(number);
  TORCH_CHECK_VALUE(keys.size() == gradients.size(), "deliver: ", keys.size(), " parameters and ",
                    gradients.size(), " gradients");
  const auto shared = shared_memory(gradients);
  std::vector<int64_t> result(keys.size(), 0);
  for (size_t i = 0; i < keys.size(); ++i) {
    TORCH_CHECK_VALUE(keys[i] >= 0 && keys[i] < signatures->table->keys(), "deliver: parameter ",
                      keys[i], ", there are ", signatures->table->keys());
    const std::optional<at::Tensor> gradient = gradients.get(i);
    if (gradient) {
      result[i] = static_cast<int64_t>(deliver_one(*signatures, keys[i], *gradient, shared));
    }
  }
  const auto in_place = static_cast<int64_t>(Outcome::in_place);
  for (size_t i = 0; i < keys.size(); ++i) {
    const std::optional<at::Tensor> gradient = gradients.get(i);
    // In another one's place, or in its own but not as it must lie there.
    if (gradient && result[i] != in_place) move_out(*signatures, *gradient);
  }
  for (const int64_t key : keys) signatures->table->withdraw(key);
  result.push_back(signatures->table->given_up_count());
  return result;
}

// Of what still lives in the memory: its first byte there, its bytes, and whether it is fixed.
std::vector<int64_t> vacate_memory(int64_t number, const at::Tensor& memory,
                                   at::TensorList candidates) {
  const auto signatures = find(number);
  storage_of(memory, "vacate: memory");
  TORCH_CHECK_VALUE(memory.is_contiguous(), "vacate: memory is not contiguous");
  // First: otherwise another thread's gradient might be born there meanwhile.
  signatures->table->withdraw(memory.const_data_ptr(), memory.nbytes());
  for (const at::Tensor& tensor : candidates) move_out(*signatures, tensor);
  const auto begin = reinterpret_cast<intptr_t>(memory.const_data_ptr());
  std::vector<int64_t> left;
  const auto end = static_cast<int64_t>(memory.nbytes());
  for (const Lodger& lodger : vacate(*signatures, memory.const_data_ptr(), memory.nbytes())) {
    const int64_t at = reinterpret_cast<intptr_t>(lodger.stretch.data) - begin;
    const int64_t first = std::max<int64_t>(at, 0);
    const int64_t last = std::min(at + static_cast<int64_t>(lodger.stretch.bytes), end);
    left.insert(left.end(), {first, last - first, lodger.fixed});
  }
  return left;
}

std::vector<int64_t> counters(int64_t number) {
  const Counters counted = find(number)->table->counters();
  return {counted.hits, counted.misses, counted.relearned, counted.learned, counted.unlearned};
}

std::vector<int64_t> given_up(int64_t number) {
  const auto table = find(number)->table;
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < table->keys(); ++key) {
    if (table->given_up(key)) keys.push_back(key);
  }
  return keys;
}

void move_back_tensor(const at::Tensor& tensor, bool copy) {
  move_back(storage_of(tensor, "move_back: tensor"), copy);
}

TORCH_LIBRARY(dmuon_allocator, library) {
  library.def("move_storage(Tensor(a!) tensor, Tensor target, bool copy) -> ()", move_storage);
  library.def("move_back(Tensor(a!) tensor, bool copy) -> ()", move_back_tensor);
  library.def("open(Device device, int keys) -> int", open_table);
  library.def("close(int table) -> ()", close_table);
  library.def("begin(int table) -> ()", begin);
  library.def("enter(int table, int layer, int[] keys, Tensor[] places) -> ()", enter);
  library.def("leave(int table) -> ()", leave);
  library.def("deliver(int table, int[] keys, Tensor?[] gradients) -> int[]", deliver);
  library.def("vacate(int table, Tensor memory, Tensor[] candidates) -> int[]", vacate_memory);
  library.def("counters(int table) -> int[]", counters);
  library.def("given_up(int table) -> int[]", given_up);
}

}  // namespace
}  // namespace dmuon::allocator
