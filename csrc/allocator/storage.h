// Storages that change their memory while tensors use them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "shim.h"

namespace dmuon::allocator {

inline void copy_bytes(void* to, const void* from, size_t bytes, c10::Device device) {
  if (bytes == 0) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  const auto length = static_cast<int64_t>(bytes);
  // A tensor's copy, and not the allocator's: on CUDA it takes its turn in the present stream.
  at::from_blob(to, {length}, options)
      .copy_(at::from_blob(const_cast<void*>(from), {length}, options));
}

inline c10::StorageImpl& storage_of(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
                        (tensor.is_cpu() || tensor.is_cuda()),
                    what, ": expected a strided tensor with memory on a CPU or a CUDA device");
  return *tensor.storage().unsafeGetStorageImpl();
}

// Bytes from the storage's first to the tensor's last.
inline uint64_t extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<uint64_t>(last + 1) * tensor.element_size();
}

inline void check_aligned(const at::Tensor& memory, const char* what) {
  const auto start = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  TORCH_CHECK_VALUE(start % kPlaceAlignment == 0, what, ": starts ", start % kPlaceAlignment,
                    " bytes behind a multiple of ", kPlaceAlignment, ", expected a multiple");
}

// Points the storage of `tensor` at the memory of `target`, which it keeps alive.
inline void move_storage(const at::Tensor& tensor, const at::Tensor& target, bool copy) {
  c10::StorageImpl& storage = storage_of(tensor, "move_storage: tensor");
  const c10::StorageImpl& other = storage_of(target, "move_storage: target");
  TORCH_CHECK_VALUE(&storage != &other, "move_storage: target is the tensor's own storage");
  TORCH_CHECK_VALUE(tensor.device() == target.device(), "move_storage: tensor is on ",
                    tensor.device(), " and target on ", target.device());
  TORCH_CHECK_VALUE(target.is_contiguous(), "move_storage: target is not contiguous");
  const uint64_t held = storage.nbytes();
  const uint64_t needed = std::max<uint64_t>(held, extent_of(tensor));
  TORCH_CHECK_VALUE(target.nbytes() >= needed, "move_storage: target has ", target.nbytes(),
                    " bytes, expected at least ", needed);
  check_aligned(target, "move_storage: target");
  void* data = target.data_ptr();
  if (copy) copy_bytes(data, storage.data(), held, tensor.device());
  c10::DataPtr moved(
      data, new at::Tensor(target), [](void* kept) { delete static_cast<at::Tensor*>(kept); },
      tensor.device());
  storage.set_data_ptr(std::move(moved));
  storage.set_nbytes(needed);
}

// Gives a storage ordinary memory of the same length.
inline void move_back(c10::StorageImpl& storage, bool copy) {
  const Pause pause;
  const c10::Device device = storage.device();
  const c10::OptionalDeviceGuard guard(device);
  c10::Allocator* own = storage.allocator();
  c10::Allocator& allocator = own != nullptr ? *own : *c10::GetAllocator(device.type());
  c10::DataPtr memory = allocator.allocate(storage.nbytes());
  if (copy) copy_bytes(memory.get(), storage.data(), storage.nbytes(), device);
  storage.set_data_ptr(std::move(memory));
}

}  // namespace dmuon::allocator
