#!/bin/bash
# The first process of a host: makes its file system, starts its sshd, and waits.
#
#   host_main.sh NAME KEYS [PATH...]
#
# KEYS is a folder with what all hosts have in common. Every PATH is seen by the host as it is, even if it lies in
# a folder that each host has for itself. The host ends with this process, which ends with its standard input.
set -eu
name=$1 keys=$2
shift 2

hostname "$name"
mount -t sysfs none /sys # of this network

mount -t tmpfs -o mode=755 none /mnt
cp -r "$keys" /mnt/keys
number=0
for path in "$@"; do
  number=$((number + 1))
  if [ -d "$path" ]; then mkdir "/mnt/$number"; else touch "/mnt/$number"; fi
  mount --bind "$path" "/mnt/$number"
  mount -o remount,bind,ro "/mnt/$number"
done
for folder in /tmp /root /run /dev/shm; do
  mount -t tmpfs none "$folder"
done
chmod 700 /root
chmod 755 /run
chmod 1777 /tmp /dev/shm
number=0
for path in "$@"; do
  number=$((number + 1))
  if [ -d "/mnt/$number" ]; then mkdir -p "$path"; else mkdir -p "${path%/*}"; touch "$path"; fi
  mount --move "/mnt/$number" "$path"
done

mkdir -p /run/sshd /run/lock
mkdir -m 700 /root/.ssh
cp /mnt/keys/id_ed25519* /mnt/keys/authorized_keys /root/.ssh
chmod 600 /mnt/keys/ssh_host_key /root/.ssh/*
mount --bind /mnt/keys/hosts /etc/hosts
# The disk is the machine's; nothing is written to it.
mount -o remount,bind,ro /

/usr/sbin/sshd -D -f /mnt/keys/sshd_config -E /run/sshd.log &
echo ready
read -r _ || true
