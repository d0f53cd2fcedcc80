// The wrapper around torch's CUDA allocator: `allocate` asks the table, all else is handed on.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/headeronly/version.h>

#include "shim.h"

// A virtual function that the wrapper does not know would be torch's default and not the present
// allocator's: nothing would fail, and memory pools or snapshots would be wrong.
#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 13 || TORCH_VERSION_MINOR > 14
#error "csrc/allocator/cuda_shim.cpp knows the CUDA allocators of torch 2.13 and 2.14; add this one"
#endif

namespace dmuon::allocator {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;

class CudaShim final : public caching::CUDAAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return allocator::allocate(
        bytes,
        [] { return c10::Device(c10::DeviceType::CUDA, c10::cuda::current_device()); },
        [&] { return inner_->allocate(bytes); });
  }

  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    // A place is no block of the caching allocator; its pool orders its use by events.
    if (data.get_deleter() != &end_ticket) inner_->recordStream(data, stream);
  }
  using CUDAAllocator::recordStream;

  // Of ordinary memory, as in CpuShim.
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return inner_->is_simple_data_ptr(data);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    inner_->copy_data(to, from, bytes);
  }

  bool initialized() override { return inner_->initialized(); }
  void emptyCache(MempoolId_t pool) override { inner_->emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    return inner_->getDeviceStats(device);
  }
  void resetAccumulatedStats(DeviceIndex device) override { inner_->resetAccumulatedStats(device); }
  void resetPeakStats(DeviceIndex device) override { inner_->resetPeakStats(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return inner_->getMemoryInfo(device);
  }

  void* raw_alloc(size_t bytes) override { return inner_->raw_alloc(bytes); }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return inner_->raw_alloc_with_stream(bytes, stream);
  }
  void raw_delete(void* data) override { inner_->raw_delete(data); }
  void init(int devices) override { inner_->init(devices); }
  double getMemoryFraction(DeviceIndex device) override {
    return inner_->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    inner_->setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return inner_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { inner_->enable(value); }
  bool isEnabled() const override { return inner_->isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest) override {
    inner_->cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* data, size_t* size) override {
    return inner_->getBaseAllocation(data, size);
  }
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool traces) override {
    return inner_->snapshot(pool, traces);
  }

  void beginAllocateToPool(DeviceIndex device, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    inner_->beginAllocateToPool(device, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t pool) override {
    inner_->endAllocateToPool(device, pool);
  }
  void markCaptureBegin(DeviceIndex device) override { inner_->markCaptureBegin(device); }
  void markCaptureEnd(DeviceIndex device) override { inner_->markCaptureEnd(device); }
  void releasePool(DeviceIndex device, MempoolId_t pool) override {
    inner_->releasePool(device, pool);
  }
  int getPoolUseCount(DeviceIndex device, MempoolId_t pool) override {
    return inner_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    inner_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t pool, bool use) override {
    inner_->setUseOnOOM(device, pool, use);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t pool) override {
    inner_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return inner_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex device,
                                                              MempoolId_t pool) override {
    return inner_->getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(
      DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override {
    return inner_->setCheckpointPoolState(device, std::move(state));
  }
  c10::DataPtr allocateWithAddress(size_t size, void* address) override {
    return inner_->allocateWithAddress(size, address);
  }

  caching::ShareableHandle shareIpcHandle(void* data) override {
    return inner_->shareIpcHandle(data);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return inner_->getIpcDevPtr(std::move(handle));
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex to) override {
    inner_->enablePeerAccess(device, to);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, size_t count,
                          cudaStream_t stream, bool peer) override {
    return inner_->memcpyAsync(to, to_device, from, from_device, count, stream, peer);
  }

  bool isHistoryEnabled() override { return inner_->isHistoryEnabled(); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return inner_->getContextForPointer(data);
  }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t entries,
                     caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    inner_->recordHistory(enabled, recorder, entries, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& text) override {
    inner_->recordAnnotation(text);
  }
  void pushCompileContext(std::string& text) override { inner_->pushCompileContext(text); }
  void popCompileContext() override { inner_->popCompileContext(); }
  void setUserMetadata(const std::string& text) override { inner_->setUserMetadata(text); }
  std::string getUserMetadata() override { return inner_->getUserMetadata(); }
#if TORCH_VERSION_MINOR >= 14
  bool supportsUserMetadata() override { return inner_->supportsUserMetadata(); }
  void annotateMemory(const void* data, const std::string& text) override {
    inner_->annotateMemory(data, text);
  }
#endif
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    inner_->attachOutOfMemoryObserver(std::move(observer));
  }
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    inner_->attachOomRejectionObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    inner_->attachAllocatorTraceTracker(std::move(tracker));
  }
  std::string name() override { return inner_->name(); }

  // Storages remember the wrapper as their allocator: it stays usable after `uninstall`.
  static CudaShim& get() {
    static CudaShim& shim = *new CudaShim;
    return shim;
  }

  void install() {
    CUDAAllocator* present = caching::get();
    if (present == this) return;
    TORCH_CHECK(!installed_,
                "allocation signatures: another CUDA allocator was installed over theirs; install "
                "it before the first runtime");
    inner_ = present;
    installed_ = true;
    caching::allocator.store(this);
  }

  void uninstall() {
    // Who was installed later calls this one, and goes on doing so.
    CUDAAllocator* expected = this;
    installed_ = !caching::allocator.compare_exchange_strong(expected, inner_);
  }

 private:
  CUDAAllocator* inner_ = nullptr;
  bool installed_ = false;
};

}  // namespace

void install_cuda() { CudaShim::get().install(); }

void uninstall_cuda() { CudaShim::get().uninstall(); }

}  // namespace dmuon::allocator
