#include "shm_pool.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "../core/types.h"

namespace dmuon {
namespace {

constexpr char kFolder[] = "/dev/shm";
constexpr size_t kHeaderBytes = 8192;
// Of a node and of a rail, without the rank itself.
constexpr int kMaxPeers = kMaxRails + kMaxNodes - 2;
constexpr int kNamed = 8;  // ranks in an error

struct Header {
  std::atomic<uint32_t> ready;   // 1: the rest is written
  std::atomic<uint32_t> mapped;  // peers that have this memory
  char settings[256];
  std::atomic<int32_t> who[kMaxPeers];  // they, in the order in which they came: rank + 1
};
static_assert(sizeof(Header) <= kHeaderBytes);

Header* header_of(std::byte* start) { return reinterpret_cast<Header*>(start); }

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// Rounded up where it is what is needed, down where it is what is there.
std::string mebibytes(double bytes, bool up) {
  const double tenths = bytes / (1 << 20) * 10;
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", (up ? std::ceil(tenths) : std::floor(tenths)) / 10);
  return text;
}

std::string prefix() { return "/dmuon-" + std::to_string(getuid()) + "-"; }

std::string name_of(const std::string& job, int rank) {
  return prefix() + job + "-" + std::to_string(rank);
}

[[noreturn]] void fail(const std::string& what, const std::string& name) {
  throw ShmError(what + " " + kFolder + name + ": " + std::strerror(errno));
}

// Raises unless a segment belongs to this user and to nobody else, as create() makes it.
void check_private(const struct stat& status, const std::string& name) {
  constexpr mode_t kPermissions = 07777, kPrivate = 0600;
  if (status.st_uid == geteuid() && (status.st_mode & kPermissions) == kPrivate) return;
  char text[128];
  std::snprintf(text, sizeof text,
                ": belongs to user %u with mode %04o, expected user %u with %04o",
                static_cast<unsigned>(status.st_uid), status.st_mode & kPermissions,
                static_cast<unsigned>(geteuid()), kPrivate);
  throw ShmError(std::string(kFolder) + name + text +
                 "; it is not mapped, because others could read and write it");
}

class File {
 public:
  explicit File(int file) : file_(file) {}
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return file_; }

 private:
  int file_;
};

// Remove what jobs of this user left when they were killed before their memory lost its name. A
// rank holds a lock on its segment as long as it has a name; the kernel gives the lock up with the
// process. (A process number would not do: another container that shares the folder numbers anew.)
void remove_stale() {
  DIR* folder = opendir(kFolder);
  if (folder == nullptr) return;
  const std::string begin = prefix().substr(1);
  while (const dirent* entry = readdir(folder)) {
    const std::string file_name = entry->d_name;
    if (file_name.compare(0, begin.size(), begin) != 0) continue;
    const std::string name = "/" + file_name;
    const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (file.get() < 0 || flock(file.get(), LOCK_EX | LOCK_NB) != 0) continue;
    // Another rank that starts may have removed it meanwhile, and a live job have taken the name.
    // Invariant: only who holds the lock removes the name, so a name that is there is this file's.
    struct stat status;
    if (fstat(file.get(), &status) == 0 && status.st_nlink > 0) shm_unlink(name.c_str());
  }
  closedir(folder);
}

}  // namespace

ShmPool::ShmPool(const std::string& job, int rank, uint64_t bytes, const std::string& settings,
                 double timeout_seconds, const int32_t* stop, const int32_t* names)
    : job_(job),
      rank_(rank),
      bytes_(kHeaderBytes + bytes),
      settings_(settings),
      timeout_(timeout_seconds),
      stop_(stop),
      names_(names) {
  remove_stale();
  try {
    create(name_of(job, rank));
  } catch (...) {
    release();
    throw;
  }
}

void ShmPool::attach(const std::vector<int>& peers) {
  const double deadline = now() + timeout_;
  try {
    for (const int peer : peers) attach_one(peer, deadline);
    wait_until_mapped(peers, deadline);
    if (!disagreement_.empty()) throw ShmError(disagreement_);
  } catch (...) {
    release();
    // Whoever was killed meanwhile cannot: those who waited for it remove what it left.
    remove_stale();
    throw;
  }
  shm_unlink(name_.c_str());
  name_.clear();
  close(file_);
  file_ = -1;
}

ShmPool::~ShmPool() {
  release();
  // A rank that was killed between the others' mapping and its own end of the opening has left a
  // name, which they have not seen before.
  remove_stale();
}

std::byte* ShmPool::memory(int rank) const {
  for (const Mapping& mapping : mappings_) {
    if (mapping.rank == rank) return mapping.start + kHeaderBytes;
  }
  return nullptr;
}

void ShmPool::create(const std::string& name) {
  for (;;) {
    file_ = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (file_ < 0) {
      if (errno == EEXIST) {
        throw ShmError(std::string(kFolder) + name +
                       " exists: another running job of this user has the same name");
      }
      fail("cannot create", name);
    }
    name_ = name;
    // Another job's remove_stale() may have come between creation and lock. It holds its lock until
    // the name is gone, so this does not wait long, and the count then shows it.
    if (flock(file_, LOCK_SH) != 0) fail("cannot lock", name);
    struct stat status;
    if (fstat(file_, &status) != 0) fail("cannot look at", name);
    if (status.st_nlink > 0) break;
    close(file_);
    file_ = -1;
    name_.clear();
  }
  if (ftruncate(file_, static_cast<off_t>(bytes_)) != 0) fail("cannot size", name);
  // Now, with an error: a write to memory that the folder has no room for would end the process.
  int error;
  do {
    error = posix_fallocate(file_, 0, static_cast<off_t>(bytes_));
  } while (error == EINTR);
  if (error != 0) {
    struct statvfs space {};
    statvfs(kFolder, &space);
    throw ShmError(std::string(kFolder) + ": rank " + named(rank_) + " needs " +
                   mebibytes(static_cast<double>(bytes_), true) + ", " +
                   mebibytes(static_cast<double>(space.f_bavail * space.f_frsize), false) +
                   " are free (" + std::strerror(error) + "); ask for a smaller window, or give " +
                   "it more (docker run --shm-size, mount -o remount,size=... /dev/shm)");
  }
  mappings_.push_back({rank_, map(file_, name)});
  Header* header = header_of(mappings_[0].start);
  std::strncpy(header->settings, settings_.c_str(), sizeof header->settings - 1);
  header->ready.store(1, std::memory_order_release);
}

std::byte* ShmPool::map(int file, const std::string& name) {
  void* start = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (start == MAP_FAILED) fail("cannot map", name);
  return static_cast<std::byte*>(start);
}

std::string ShmPool::named(int rank) const {
  return std::to_string(names_ == nullptr ? rank : names_[rank]);
}

// Others are being started meanwhile: nobody is in a hurry here.
void ShmPool::nap() const {
  if (stop_ != nullptr && __atomic_load_n(stop_, __ATOMIC_RELAXED) != 0) {
    throw ShmTimeout("shared memory of job " + job_ + ": the opening was stopped");
  }
  const timespec time{0, 500'000};
  nanosleep(&time, nullptr);
}

void ShmPool::give_up(const std::string& awaited) const {
  if (!disagreement_.empty()) throw ShmError(disagreement_);
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f", timeout_);
  throw ShmTimeout("shared memory of job " + job_ + ": rank " + named(rank_) + " waited " +
                   seconds + " s for " + awaited);
}

void ShmPool::attach_one(int peer, double deadline) {
  const std::string name = name_of(job_, peer);
  const auto late = [&](const char* what) { give_up("rank " + named(peer) + " to " + what); };
  for (;; nap()) {
    const File file(shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (file.get() < 0 && errno != ENOENT) fail("cannot open", name);
    struct stat status;
    if (file.get() >= 0 && fstat(file.get(), &status) != 0) fail("cannot look at", name);
    // Before anything in it is believed: anybody may have put a file here under the peer's name.
    if (file.get() >= 0) check_private(status, name);
    // Room for the header means that the size is set; the rest must then be right.
    if (file.get() < 0 || status.st_size < static_cast<off_t>(kHeaderBytes)) {
      if (now() > deadline) late("create its own");
      continue;
    }
    // Sizes may differ only with the settings: map what is surely there to read these.
    void* start = mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (start == MAP_FAILED) fail("cannot map", name);
    Header* header = static_cast<Header*>(start);
    const bool ready = header->ready.load(std::memory_order_acquire) != 0;
    const std::string theirs = ready ? std::string(header->settings) : std::string();
    // Only noted: whoever left now would take its name along, and the other would wait for it.
    if (ready && theirs != settings_) {
      disagreement_ = "job " + job_ + ": rank " + named(rank_) + " has " + settings_ +
                      ", rank " + named(peer) + " has " + theirs;
    } else if (ready) {
      mappings_.push_back({peer, map(file.get(), name)});
    }
    if (ready) {
      const uint32_t place = header->mapped.fetch_add(1);
      if (place < kMaxPeers) header->who[place] = rank_ + 1;
    }
    munmap(start, kHeaderBytes);
    if (ready) return;
    if (now() > deadline) late("fill in its own");
  }
}

void ShmPool::wait_until_mapped(const std::vector<int>& peers, double deadline) {
  const Header& header = *header_of(mappings_[0].start);
  for (; header.mapped < peers.size(); nap()) {
    if (now() <= deadline) continue;
    std::string missing;
    int count = 0;
    for (const int peer : peers) {
      const auto is_peer = [&](const std::atomic<int32_t>& who) { return who == peer + 1; };
      if (std::any_of(std::begin(header.who), std::end(header.who), is_peer)) continue;
      // The first few tell enough.
      if (++count <= kNamed) missing += (count > 1 ? ", " : "") + named(peer);
    }
    if (count > kNamed) missing += " and " + std::to_string(count - kNamed) + " more";
    give_up((count > 1 ? "ranks " : "rank ") + missing + " to map its memory");
  }
}

void ShmPool::release() {
  for (const Mapping& mapping : mappings_) munmap(mapping.start, bytes_);
  mappings_.clear();
  if (!name_.empty()) shm_unlink(name_.c_str());
  name_.clear();
  if (file_ >= 0) close(file_);
  file_ = -1;
}

}  // namespace dmuon
