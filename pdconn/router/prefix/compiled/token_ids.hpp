// Reads the token ids of a prompt: a JSON array of integers from 0 to 2**31 - 1, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace pdconn {

class TokenIds {
public:
    explicit TokenIds(std::string_view json) : at_(json.data()), end_(at_ + json.size()) {
        ids.reserve(json.size() / 4);
    }

    std::vector<std::int32_t> ids;

    // False if it is anything else, which Python reads.
    bool read() {
        skip_space();
        if (!skip('[')) return false;
        skip_space();
        if (!skip(']')) {
            do {
                skip_space();
                if (!read_id()) return false;
                skip_space();
            } while (skip(','));
            if (!skip(']')) return false;
        }
        skip_space();
        return at_ == end_;
    }

private:
    void skip_space() {
        while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) at_++;
    }

    bool skip(char expected) {
        if (at_ == end_ || *at_ != expected) return false;
        at_++;
        return true;
    }

    bool read_id() {
        const char *const begin = at_;
        std::uint64_t value = 0;
        for (; at_ != end_ && *at_ >= '0' && *at_ <= '9'; at_++) {
            value = value * 10 + static_cast<std::uint64_t>(*at_ - '0');
            if (value > INT32_MAX) return false;
        }
        if (at_ == begin || (*begin == '0' && at_ - begin > 1)) return false;  // JSON has no 01
        ids.push_back(static_cast<std::int32_t>(value));
        return true;
    }

    const char *at_, *end_;
};

}  // namespace pdconn
